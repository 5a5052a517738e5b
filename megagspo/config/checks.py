"""What no single value can tell: contradictions (refused), dubious combinations (warned), missing files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagspo.config.guard import check_group_size, guard
from megagspo.config.schema import Config, JsonlSource, Source
from megagspo.errors import ConfigError, MissingError


def check_config(config: Config) -> list[str]:
    """Warnings for the user to read. Raises ConfigError where values contradict each other; reads no file."""
    check_group_size(config.algorithm, config.rollout.responses)
    _check_minibatches(config)
    _check_evaluation(config)
    _check_learning_rates(config)
    _check_overlong(config)
    return guard(config.algorithm)


def check_paths(config: Config, *, training: bool = True) -> None:
    """Raises MissingError for a file or directory that the configuration names and that is not there.

    training: false leaves out what only training reads.
    """
    model = Path(config.model.path)
    if not model.is_dir():
        raise MissingError(
            f"model.path: there is no directory {model}: give a Hugging Face model directory, or make a tiny "
            "model with `make demo` or tools/make_tiny_moe.py"
        )
    if not (model / "config.json").is_file():
        raise MissingError(
            f"model.path: {model} is no Hugging Face model directory, it has no config.json: give one, such "
            "as the hf/ of a run"
        )
    if training:
        _check_training_paths(config)
        _check_sources("train", config.data.train)
    _check_sources("eval", config.data.eval)


def _check_training_paths(config: Config) -> None:
    checkpoint, replay = config.model.checkpoint, config.rollout.replay
    if checkpoint is not None and not (Path(checkpoint) / ".metadata").is_file():
        wrong = f"there is no directory {checkpoint}"
        if Path(checkpoint).is_dir():
            wrong = f"{checkpoint} is no Megatron checkpoint, it has no file .metadata"
        raise MissingError(
            f"model.checkpoint: {wrong}: give one such as runs/NAME/checkpoints/step_000010, or remove the "
            "key to start from the weights in model.path"
        )
    if replay is not None and not Path(replay).is_dir():
        raise MissingError(
            f"rollout.replay: there is no directory {replay}: give the rollouts/ of a run, "
            "or remove the key to make new rollouts"
        )


def _check_sources(key: str, sources: Sequence[Source]) -> None:
    for position, source in enumerate(sources):
        if isinstance(source, JsonlSource) and not Path(source.jsonl).is_file():
            raise MissingError(
                f"data.{key}.{position}.jsonl: there is no file {source.jsonl}: "
                "give a file with one JSON object a line"
            )


def _check_minibatches(config: Config) -> None:
    rollout, minibatches = config.rollout, config.trainer.minibatches
    samples = rollout.prompts * rollout.responses
    if minibatches > samples:
        raise ConfigError(
            f"trainer.minibatches={minibatches} but a step has only rollout.prompts={rollout.prompts} * "
            f"responses={rollout.responses} = {samples} samples: set trainer.minibatches={samples} or less"
        )


def _check_learning_rates(config: Config) -> None:
    if config.optimizer.lr_min > config.optimizer.lr:
        raise ConfigError(
            f"optimizer.lr_min={config.optimizer.lr_min:g} is above optimizer.lr={config.optimizer.lr:g}: "
            "the schedule goes from lr down to lr_min; lower lr_min"
        )


def _check_evaluation(config: Config) -> None:
    if config.eval.every > 0 and not config.data.eval:
        raise ConfigError(
            f"eval.every={config.eval.every} but data.eval is empty: list sources there, or set eval.every=0"
        )


def _check_overlong(config: Config) -> None:
    buffer, limit = config.algorithm.overlong.buffer, config.rollout.response_length_max
    if buffer > limit:
        raise ConfigError(
            f"algorithm.overlong.buffer={buffer} is above rollout.response_length_max={limit}: responses of "
            "any length would be punished: lower the buffer"
        )
