"""A run's checkpoints on disk: written whole or not at all, found again after any crash.

    checkpoints/step_000010/        weights, optimizer, counters (Megatron); state.json; manifest.json
    checkpoints/latest              the name of the newest, updated last
    checkpoints/step_000020.partial being written, or left by a crash; never loaded, replaced by the next save

`manifest.json` lists every file with its size. It is written last before the rename, so a directory that was
cut short, by a crash or by a copy, is noticed and the one before it is used, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megagspo.convert.safetensors_io import fsync_directory, fsync_tree, replace_directory
from megagspo.errors import CheckpointError, disk_error_number, refusal, writing

_NAME = re.compile(r"^step_(\d{6,})$")
_MANIFEST, _STATE = "manifest.json", "state.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    step: int
    directory: Path

    def state(self) -> dict[str, Any]:
        """What the loop saved beside the policy."""
        return json.loads((self.directory / _STATE).read_text())


class CheckpointDirectory:
    """The `checkpoints/` of a run. `rank` 0 touches names; `barrier` makes the other ranks wait for it."""

    def __init__(self, root: Path, *, keep: int, rank: int, barrier: Callable[[], object]) -> None:
        self.root = root
        self._keep = keep
        self._first = rank == 0
        self._barrier = barrier

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """write(directory) is called by all ranks and writes the policy's part.

        Raises CheckpointError when the disk refuses; earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step:06d}"
        partial = self.root / f"step_{step:06d}.partial"
        try:
            if self._first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._barrier()
            with quiet_writers():
                write(partial)
            self._barrier()
            if self._first:
                (partial / _STATE).write_text(json.dumps(state, indent=2) + "\n")
                self._seal(partial, final)
        except (OSError, RuntimeError, CheckpointException) as error:  # the last two wrap what the disk says
            raise CheckpointError(
                f"checkpoint {final} could not be written {_cause_and_remedy(error, final)}. Earlier "
                "checkpoints are untouched"
            ) from error
        self._barrier()

    def _seal(self, partial: Path, final: Path) -> None:
        (partial / _MANIFEST).write_text(json.dumps(_sizes(partial), indent=2) + "\n")
        fsync_tree(partial)
        replace_directory(partial, final)
        self._point_to(final.name)
        self._forget()

    def _point_to(self, name: str) -> None:
        """Makes `latest` name a checkpoint."""
        pointer = self.root / "latest.partial"
        with writing(self.root / "latest"):
            with pointer.open("w") as file:
                file.write(name + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(pointer, self.root / "latest")
            fsync_directory(self.root)

    def _pointer(self) -> str | None:
        latest = self.root / "latest"
        return latest.read_text().strip() if latest.is_file() else None

    def _forget(self) -> None:
        """Removes what is older than the last `keep` whole checkpoints: a damaged one takes no place."""
        steps = self._steps()
        whole = [checkpoint for checkpoint in steps if _fault(checkpoint.directory) is None]
        for checkpoint in steps:
            if checkpoint.step < whole[: self._keep][-1].step:
                shutil.rmtree(checkpoint.directory)

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; each newer one that is not whole is warned about. Called by the first
        rank, which tells the others: they must not choose for themselves."""
        for checkpoint in self._steps():
            if fault := _fault(checkpoint.directory):
                warn(f"{checkpoint.directory} is not whole ({fault}): going back to an older checkpoint")
                continue
            if self._pointer() != checkpoint.directory.name:
                # A crash came between the checkpoint's rename and the pointer's.
                self._point_to(checkpoint.directory.name)
            return checkpoint
        return None

    def _steps(self) -> list[Checkpoint]:
        """Newest first."""
        if not self.root.is_dir():
            return []
        found = [
            Checkpoint(step=int(match[1]), directory=entry)
            for entry in self.root.iterdir()
            if (match := _NAME.match(entry.name))
        ]
        return sorted(found, key=lambda checkpoint: -checkpoint.step)


@contextmanager
def quiet_writers() -> Iterator[None]:
    """Megatron logs what its writers meet, then raises it: the user is told once, by the error. Megatron 0.19
    raises no more than the class of what was met, so what it logged goes into the error's text."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async")
    logged: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return False

    logger.addFilter(keep)
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not logged:
            raise
        # The first is the writer's own; it comes last, where `_cause_and_remedy` looks.
        raise RuntimeError("\n".join([str(error), *reversed(logged)])) from error
    finally:
        logger.removeFilter(keep)


def _cause_and_remedy(error: BaseException, place: Path) -> str:
    number = disk_error_number(error)
    if number is not None:
        return f"({refusal(place, number)}): make room there or change run.dir, then start the run again"
    # Of a failure in a library the last line says most: torch puts tracebacks before it.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"({[type(error).__name__, *lines][-1]}): start the run again"


def _sizes(directory: Path) -> dict[str, int]:
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != _MANIFEST)
    return {str(file.relative_to(directory)): file.stat().st_size for file in sorted(files)}


def _fault(directory: Path) -> str | None:
    """What is missing from a checkpoint directory; None when it is whole."""
    try:
        listed = json.loads((directory / _MANIFEST).read_text())
    except (OSError, json.JSONDecodeError):
        return f"no readable {_MANIFEST}"
    present = _sizes(directory)
    for name, size in listed.items():
        if present.get(name) != size:
            return f"{name} has {present.get(name, 0)} bytes, {size} were written"
    return None
