"""Where a run's numbers go: one JSON object a step in `metrics.jsonl`, and TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


class MetricsLog:
    """Appends one record a step. A key that does not apply is absent from a record, never 0.

    A run that continues from step `resume_step` first drops the records after it, which it is about to make
    again; so the file of a run that was interrupted is that of one that was not.
    """

    def __init__(self, directory: Path, *, resume_step: int, tensorboard: bool) -> None:
        self._path = directory / "metrics.jsonl"
        self._drop_after(resume_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the record of a step; it is in the file when this returns."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def _drop_after(self, step: int) -> None:
        if not self._path.is_file():
            return
        kept = [record for record in read_metrics(self._path) if record["step"] <= step]
        partial = self._path.with_name("metrics.jsonl.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(partial, self._path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a `metrics.jsonl`. A last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return records
