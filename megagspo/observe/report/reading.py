"""What the files of a run directory say, and what they do not: the report's only source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagspo.config.yaml_text import parse
from megagspo.errors import ConfigError, DataError, MissingError
from megagspo.observe.metrics import parse_metrics
from megagspo.observe.report.samples import StepAnswers, full_reward, sample_answers
from megagspo.observe.report.series import Metrics, as_metrics
from megagspo.observe.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Scores of `megagspo eval --json` by name: of the model that the run started from
    (`held_out_before.json`), and of the one it made (`held_out.json`). Empty where there is no such file.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The Hugging Face configuration of the trained model, and where the run directory holds it.

    parameters: how many the exported weights have; None without an export.
    """

    source: str
    config: Mapping[str, Any]
    parameters: int | None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, read. config is the resolved configuration as plain values, not validated: it may be of another
    version. other_ranks: how many ranks left a log, None where there are no logs; notes: what a reader of
    the page must know about the files."""

    name: str
    config: Mapping[str, Any]
    config_text: str
    metrics: Metrics
    held_out: HeldOut
    answers: tuple[StepAnswers, ...]
    model: ModelFacts | None
    checkpoints: tuple[int, ...]
    other_ranks: int | None
    notes: tuple[str, ...]

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        value = _setting(self.config, key)
        return default if value is None else value

    @property
    def supervised(self) -> bool:
        """Whether it is a warm-up: its records know no reward."""
        return not any(name.startswith("reward/") for name in self.metrics.values)


def read_run(root: Path) -> RunData:
    """Reads the directory of a run that ended or is still going on. Raises MissingError where it is none or
    has no metrics yet, DataError where its configuration or metrics are broken."""
    directory = RunDirectory(root)
    if not root.is_dir():
        raise MissingError(f"there is no directory {root}: give that of a run, as runs/NAME")
    if not directory.config.is_file():
        raise MissingError(
            f"{root} is not the directory of a run, it has no config.yaml: give runs/NAME of a run"
        )
    config_text, config = _config(directory.config)
    metrics, notes = _metrics(root)
    before, unread = _scores(root / "held_out_before.json")
    after, unread_too = _scores(root / "held_out.json")
    answers, skipped = sample_answers(directory.rollouts, full=full_reward(config))
    return RunData(
        name=str(_setting(config, "run.name") or root.resolve().name),
        config=config,
        config_text=config_text,
        metrics=metrics,
        held_out=HeldOut(before=before, after=after),
        answers=tuple(answers),
        model=_model(directory),
        checkpoints=tuple(sorted(_steps(directory.checkpoints))),
        other_ranks=len(list(directory.logs.glob("rank_*.log"))) if directory.logs.is_dir() else None,
        notes=(*notes, *unread, *unread_too, *skipped),
    )


def _config(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        value = parse(text, where=str(file)).value
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(
            f"{file} cannot be read ({error}): start the run again, which writes it anew"
        ) from error
    try:
        full_reward(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} holds no configuration of a run ({error}): start the run again, which writes it anew"
        ) from error
    return text, value


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _metrics(root: Path) -> tuple[Metrics, list[str]]:
    file = root / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        records, cut_short = parse_metrics(text)
        metrics = as_metrics(records)
    except json.JSONDecodeError as error:
        line = 1 + next(i for i, line in enumerate(text.splitlines()) if line == error.doc)
        raise DataError(f"{file}, line {line}, is not JSON ({error.msg}): remove the line") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): it must hold what a run wrote") from error
    if not metrics.steps:
        raise MissingError(f"{root} has no metrics yet: {file} gets its first record when step 1 is done")
    notes = []
    if cut_short:
        notes.append(
            "The last line of metrics.jsonl is cut short and left out: "
            "the run is writing it, or was interrupted there."
        )
    lost = metrics.not_finite()
    if lost:
        listed = ", ".join(f"{name} ({count})" for name, count in lost.items())
        notes.append(f"Values that are not finite leave gaps in the charts: {listed}.")
    return metrics, notes


def _scores(file: Path) -> tuple[dict[str, float], list[str]]:
    """The scores of a file, and a note where it is there but cannot be used. A key with an @ is a score."""
    if not file.is_file():
        return {}, []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        scores = {name: float(value) for name, value in found.items() if "@" in name}
        if all(map(math.isfinite, scores.values())):
            return scores, []
        reason = "a score is not finite"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = str(error)
    return {}, [f"{file.name} cannot be read and is left out ({reason})."]


def _steps(checkpoints: Path) -> list[int]:
    names = [file.name.removeprefix("step_") for file in checkpoints.glob("step_*")]
    return [int(name) for name in names if name.isdecimal()]


def _model(directory: RunDirectory) -> ModelFacts | None:
    """From the export, else from the newest checkpoint."""
    newest = [
        f"checkpoints/step_{step:06d}/huggingface" for step in sorted(_steps(directory.checkpoints))[-1:]
    ]
    for source in ("hf", *newest):
        try:
            config = json.loads((directory.root / source / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return ModelFacts(source=source, config=config, parameters=_parameters(directory.root / source))
    return None


def _parameters(export: Path) -> int | None:
    """From the headers of the weight files."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in sorted(export.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as weights:
                total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
    return total or None
