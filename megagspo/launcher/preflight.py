"""What a command was given, checked before anything is started: neither torch nor Megatron is imported, so a
mistake is answered at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megagspo.config import Config, check_config, check_paths, load_config
from megagspo.errors import ConfigError, MissingError, writing
from megagspo.launcher.local import LAUNCHED
from megagspo.model.architecture import check_divides, read_architecture
from megagspo.observe.run_directory import RunDirectory
from megagspo.platform.world import launched_world
from megagspo.rollout.store import step_file


def run_config(file: Path, overrides: Sequence[str], *, command: Literal["train", "sft"]) -> Config:
    """The configuration of a run that `command` makes or continues; warnings are shown once.

    Raises a UserError where the configuration contradicts itself, its files, its model, the ranks that were
    started, or what is in the run's directory.
    """
    config = load_config(file, overrides)
    warnings = check_config(config)
    check_paths(config)
    check_divides(read_architecture(config.model.path), config.parallel.resolve(world_size()))
    directory = RunDirectory(config.run_dir)
    state = directory.saved_state()
    directory.refuse_other_command(command, state)
    if command == "train":
        _check_replay(config, made=state.get("step", 0))
    if speaks():
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return config


def nothing_to_do(config: Config) -> str | None:
    """A line that says so, for a run that has made more steps already than `trainer.steps` asks for. Asked
    before ranks are started: ranks that asked for themselves might not agree."""
    made, steps = RunDirectory(config.run_dir).saved_state().get("step", 0), config.trainer.steps
    if world_size() is not None or made <= steps:
        return None
    return (
        f"{config.run_dir} has made {made} steps already, and trainer.steps={steps} asks for no more: "
        f"nothing to do. Set trainer.steps above {made} to go on, or choose another run.name"
    )


def evaluation_config(target: Path, overrides: Sequence[str], *, file: Path | None = None) -> Config:
    """What `megagspo eval` is to evaluate: a configuration file's model.path, the export of a run
    (RUN_DIR/hf), or a Hugging Face directory with the configuration of the run it is in.

    file: the configuration that says on what a directory's model is evaluated, instead of the run's.
    """
    world = launched_world()
    if world is not None and world.size > 1:
        raise ConfigError(
            f"megagspo eval runs in one process, but {world.size} were started: start it without a launcher"
        )
    if target.is_dir():
        model, source = _model_and_config(target, file)
        # Quoted, for YAML would take a directory called 2025 for a number. A checkpoint that the run started
        # from has nothing to do with what it made.
        overrides = [f"model.path={json.dumps(str(model))}", "model.checkpoint=null", *overrides]
    elif file is not None:
        raise ConfigError(
            f"--config says on what a directory's model is evaluated, but {target} is a configuration "
            "itself: leave --config out"
        )
    elif not target.exists():
        raise MissingError(
            f"there is no {target}: check the name of the run's directory, model or configuration"
        )
    else:
        source = target
    config = load_config(source, overrides)
    check_paths(config, training=False)
    if config.model.checkpoint is not None:
        raise ConfigError(
            f"model.checkpoint={config.model.checkpoint}: eval reads Hugging Face weights: convert it by "
            f"`megagspo convert megatron-to-hf {config.model.checkpoint} DIR --like {config.model.path}`, "
            f"then `megagspo eval DIR --config {source}`"
        )
    return config


def check_writable(file: Path) -> None:
    """Raises UnwritableError where `--json FILE` cannot be written: found before the work, not after it."""
    there = file.exists()
    with writing(file, elsewhere="name another file with --json", then="evaluate again"):
        file.open("a").close()
        if not there:
            file.unlink()


def world_size() -> int | None:
    """How many ranks were started; None where this process was started alone."""
    world = launched_world()
    return world.size if world else None


def speaks() -> bool:
    """Whether it is this process that tells the user what all of them see: a first rank or a process alone,
    and none whose launcher has said it."""
    world = launched_world()
    return (world is None or world.is_first) and LAUNCHED not in os.environ


def _check_replay(config: Config, *, made: int) -> None:
    """Raises MissingError, naming the first, when steps to be made have no saved rollouts."""
    replay, steps = config.rollout.replay, config.trainer.steps
    if replay is None:
        return
    for step in range(made + 1, steps + 1):
        if not step_file(replay, step).is_file():
            raise MissingError(
                f"rollout.replay: {step_file(replay, step)} is not there, but steps {made + 1} to {steps} "
                "are to be made: give the rollouts of a run that made them all, or lower trainer.steps"
            )


def _model_and_config(target: Path, file: Path | None) -> tuple[Path, Path]:
    """The Hugging Face directory that `target` names or holds, and the configuration that goes with it."""
    own = target / "config.yaml"
    if own.is_file():
        if not (target / "hf").is_dir():
            remedy = _export_remedy(target, file or own)
            raise MissingError(f"{target / 'hf'} is not there, which eval reads: {remedy}")
        return target / "hf", file or own
    if not (target / "config.json").is_file():
        raise MissingError(
            f"{target} is neither the directory of a run (it has no config.yaml) nor a Hugging Face "
            "directory (it has no config.json): give one of these, or a configuration file"
        )
    source = file or Path(os.path.abspath(target)).parent / "config.yaml"
    if file is None and not source.is_file():
        raise MissingError(
            f"{target} is a Hugging Face directory outside a run: there is no {source} to say on what it is "
            "evaluated: give a configuration with --config FILE"
        )
    return target, source


def _export_remedy(run: Path, config: Path) -> str:
    checkpoints = run / "checkpoints"
    if not (checkpoints / "latest").is_file():
        return (
            f"let the run end with checkpoint.save_hf=true, or give another directory and --config {config}"
        )
    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    return (
        "start the run again with checkpoint.save_hf=true, or "
        f"`megagspo convert megatron-to-hf {newest} DIR` and `megagspo eval DIR --config {config}`"
    )
