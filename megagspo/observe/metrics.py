"""Where a run's numbers go: one JSON object a step in `metrics.jsonl`, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from megagspo.errors import DataError, NumericsError, writing
from megagspo.observe.appended import AppendedFile


class MetricsLog:
    """Appends one record a step. A key that does not apply is absent from a record, never 0.

    A run that continues from step `resume_step` first drops the records after it, which it is about to make
    again; so the file of a run that was interrupted is that of one that was not. Raises DiskError or
    UnwritableError where a file cannot be written; whole records stay whole.
    """

    def __init__(self, directory: Path, *, resume_step: int, tensorboard: bool) -> None:
        self._path = directory / "metrics.jsonl"
        self._drop_after(resume_step)
        self._file = AppendedFile(self._path)
        self._board = None
        if tensorboard:
            from megagspo.observe.board import Board

            self._board = Board(directory / "tensorboard", resume_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the record of a step; it is in the file when this returns. Raises NumericsError for a metric
        that is not finite, which JSON has no word for: the step is then in no file."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NumericsError(
                    f"metric {name} of step {step} is {value}: the step is not in {self._path}, and the "
                    "newest checkpoint is from before it"
                )
        self._file.write((json.dumps({"step": step, **metrics}, allow_nan=False) + "\n").encode())
        if self._board:
            self._board.write(step, metrics)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def _drop_after(self, step: int) -> None:
        if not self._path.is_file():
            return
        text = self._path.read_text(encoding="utf-8")
        try:
            records, _ = parse_metrics(text)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self._path} has a line that is not JSON ({error}), so the run cannot go on in it: mend or "
                "remove the line, or move the file away"
            ) from error
        kept = "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step)
        if kept == text:
            return
        partial = self._path.with_name("metrics.jsonl.partial")
        with writing(self._path):
            partial.write_text(kept, encoding="utf-8")
            os.replace(partial, self._path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a `metrics.jsonl`. A last line cut short by a crash is left out."""
    return parse_metrics(path.read_text(encoding="utf-8"))[0]


def parse_metrics(text: str) -> tuple[list[dict[str, float]], bool]:
    """The records in the text of a `metrics.jsonl`, and whether its last line is cut short and left out.
    Raises json.JSONDecodeError for any other line that is not JSON."""
    lines = text.splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return records, len(records) < len(lines)
