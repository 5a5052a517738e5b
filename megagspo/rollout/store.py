"""Samples on disk, one JSON object a line: what a step learned from, to be read and trained on again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megagspo.errors import DataError, MissingError, NumericsError, writing
from megagspo.types import Sample

_SAMPLE: TypeAdapter[Sample] = TypeAdapter(Sample)


def step_file(directory: str | Path, step: int) -> Path:
    """Where a directory of saved rollouts keeps those of a step."""
    return Path(directory) / f"step_{step:06d}.jsonl"


def write_samples(path: str | Path, samples: Iterable[Sample], step: int, version: int) -> None:
    """Writes the samples of a step made by the policy `version`; floats come back bit for bit.

    The file appears whole or not at all: it is written under a temporary name, brought to the disk, then
    renamed. JSON has no word for NaN and infinities: they are written as "NaN", "Infinity" and "-Infinity".
    Raises DiskError or UnwritableError where it cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                for sample in samples:
                    file.write(_line({"step": step, "version": version, **vars(sample)}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too, has to survive a power cut
        finally:
            os.close(directory)


def _line(record: Mapping[str, Any]) -> str:
    """The record as strict JSON."""
    try:
        return json.dumps(record, default=_fields, ensure_ascii=False, allow_nan=False)
    except ValueError:  # something in it is not finite: rare, and worth the walk only then
        return json.dumps(_spelled_out(record), ensure_ascii=False, allow_nan=False)


def _fields(value: Any) -> dict[str, Any]:
    """How json writes a record. Not dataclasses.asdict: it copies token by token."""
    return dict(value) if isinstance(value, Mapping) else vars(value)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "Infinity")
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    if isinstance(value, Mapping) or hasattr(value, "__dict__"):
        return {key: _spelled_out(item) for key, item in _fields(value).items()}
    return value


def check_finite(samples: Iterable[Sample]) -> None:
    """Raises NumericsError for a reward, by its name, or a log-probability of the engine that is not finite:
    trained on, it would spoil its whole group without a word."""
    for sample in samples:
        for what, values in (
            *((f"reward {name!r}", [value]) for name, value in sample.rewards.items()),
            ("reward", [sample.reward]),
            ("engine's log-probability", sample.completion.logprobs),
        ):
            for value in values:
                if not math.isfinite(value):
                    raise NumericsError(f"sample {sample.id}: {what} is {value}", sample=sample.id)


def read_samples(path: str | Path) -> list[Sample]:
    """The samples of a file that `write_samples` wrote. DataError names the file and line that is broken."""
    path = Path(path)
    if not path.is_file():
        raise MissingError(
            f"{path} is not there: give a file of saved rollouts, as runs/NAME/rollouts/step_000001.jsonl"
        )
    samples = []
    with path.open("rb") as file:  # so that a line that is not UTF-8 is named by its number
        for number, line in enumerate(file, start=1):
            try:
                samples.append(_SAMPLE.validate_python(json.loads(line.decode("utf-8"))))
            except ValidationError as error:
                raise DataError(f"{path}:{number}: not a saved sample: {_first(error)}") from error
            except ValueError as error:  # both a broken encoding and broken JSON
                raise DataError(
                    f"{path}:{number}: not a JSON object ({error}); delete the file or the line"
                ) from error
    if not samples:
        raise DataError(f"{path} holds no samples: delete the file, or give other rollouts")
    return samples


def _first(error: ValidationError) -> str:
    """The first of pydantic's complaints, on one line."""
    complaint = error.errors()[0]
    return f"{'.'.join(map(str, complaint['loc'])) or 'line'}: {complaint['msg']}"
