"""What no single value can tell: contradictions (refused), dubious combinations (warned), missing files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagspo.config.schema import Config, JsonlSource, Source
from megagspo.errors import ConfigError, MissingError

# A sequence ratio is a geometric mean over tokens and stays far closer to 1 than a token ratio.
GSPO_CLIP_WARN_ABOVE = 0.01
GSPO_CLIP_REFUSE_FROM = 0.05


def check_config(config: Config) -> list[str]:
    """Warnings for the user to read. Raises ConfigError where values contradict each other; reads no file."""
    _check_aggregation(config)
    _check_group(config)
    _check_minibatches(config)
    _check_evaluation(config)
    _check_learning_rates(config)
    return _gspo_clip_warnings(config)


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


def _check_aggregation(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.name == "gspo" and algorithm.aggregation == "token_mean":
        raise ConfigError(
            "algorithm.aggregation=token_mean with algorithm.name=gspo: gspo has one ratio a response and "
            "averages over responses: set algorithm.aggregation=sequence_mean or algorithm.name=grpo"
        )


def _check_group(config: Config) -> None:
    """With one response its own mean is subtracted from it: every advantage would be 0."""
    advantage = config.algorithm.advantage
    if config.rollout.responses == 1 and (advantage.baseline, advantage.scale) != ("none", "none"):
        raise ConfigError(
            f"rollout.responses=1 with algorithm.advantage.baseline={advantage.baseline}, "
            f"scale={advantage.scale}: a group of one response has no spread to learn from: "
            "set rollout.responses=2 or more, or both baseline and scale to none"
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


def _gspo_clip_warnings(config: Config) -> list[str]:
    algorithm = config.algorithm
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.name != "gspo" or widest <= GSPO_CLIP_WARN_ABOVE:
        return []
    message = (
        f"algorithm.clip_low={algorithm.clip_low:g}, clip_high={algorithm.clip_high:g} is a wide range for "
        "the sequence ratios of gspo, which hardly ever leave it; the paper has 3e-4 and 4e-4 "
        "(arXiv 2507.18071, section 5.1)"
    )
    if widest >= GSPO_CLIP_REFUSE_FROM and not algorithm.allow_wide_clip:
        raise ConfigError(
            f"{message}: from {GSPO_CLIP_REFUSE_FROM} on it is refused: remove both keys to have the paper's "
            "values, or set algorithm.allow_wide_clip=true"
        )
    return [message]
