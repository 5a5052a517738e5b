"""Samples on disk, one JSON object a line: what a step learned from, to be read and trained on again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megagspo.errors import DataError, MissingError
from megagspo.types import Sample

_SAMPLE: TypeAdapter[Sample] = TypeAdapter(Sample)


def step_file(directory: str | Path, step: int) -> Path:
    """Where a directory of saved rollouts keeps those of a step."""
    return Path(directory) / f"step_{step:06d}.jsonl"


def _fields(value: Any) -> dict[str, Any]:
    """How json writes a record. Not dataclasses.asdict: it copies token by token."""
    return dict(value) if isinstance(value, Mapping) else vars(value)


def write_samples(path: str | Path, samples: Iterable[Sample], step: int, version: int) -> None:
    """Writes the samples of a step made by the policy `version`; floats come back bit for bit.

    The file appears whole or not at all: it is written under a temporary name, brought to the disk, then
    renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for sample in samples:
                line = {"step": step, "version": version, **vars(sample)}
                file.write(json.dumps(line, default=_fields, ensure_ascii=False) + "\n")
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


def read_samples(path: str | Path) -> list[Sample]:
    """The samples of a file that `write_samples` wrote. DataError names the file and line that is broken."""
    path = Path(path)
    if not path.is_file():
        raise MissingError(
            f"{path} is not there: give a file of saved rollouts, as runs/NAME/rollouts/step_000001.jsonl"
        )
    samples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                samples.append(_SAMPLE.validate_python(json.loads(line)))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not a JSON object ({error}); delete the file or the line"
                ) from error
            except ValidationError as error:
                raise DataError(f"{path}:{number}: not a saved sample: {_first(error)}") from error
    return samples


def _first(error: ValidationError) -> str:
    """The first of pydantic's complaints, on one line."""
    complaint = error.errors()[0]
    return f"{'.'.join(map(str, complaint['loc'])) or 'line'}: {complaint['msg']}"
