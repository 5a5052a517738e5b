"""TensorBoard files, written record by record.

torch's SummaryWriter writes in a thread of its own: a full disk would be noticed steps later, after a
traceback on the terminal.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megagspo.errors import writing
from megagspo.observe.appended import AppendedFile


class Board:
    """Scalars by step, for TensorBoard. A run that continues after step `resume_step` makes TensorBoard
    forget what older files have of later steps."""

    def __init__(self, directory: Path, *, resume_step: int) -> None:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a directory's files in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; they are in the file when this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
