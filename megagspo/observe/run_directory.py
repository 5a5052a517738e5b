"""A run's directory: its files' names, and the lock that keeps a second run out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from megagspo.config import changes
from megagspo.errors import ConfigError


class RunDirectory:
    """`runs/NAME/`, as DESIGN lays it out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.checkpoints = root / "checkpoints"
        self.hf = root / "hf"
        self.rollouts = root / "rollouts"
        self.logs = root / "logs"

    def remember(self, config: str) -> list[str]:
        """Writes the resolved configuration; returns what changed since the run was last started."""
        try:
            changed = changes(self.config.read_text(), config)
        except (OSError, yaml.YAMLError):  # none yet, or cut short by a crash
            changed = []
        partial = self.config.with_name("config.yaml.partial")
        partial.write_text(config)
        os.replace(partial, self.config)
        return changed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for this process. Raises ConfigError when it cannot be written or another run
        holds it.

        The lock belongs to the process, so a run that was killed leaves none behind.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = (self.root / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root} cannot be written ({error.strerror}): "
                "change run.dir or its permissions"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise ConfigError(
                    f"run directory {self.root} is in use by process {file.read().strip() or 'unknown'}: "
                    "wait for it to end, or choose another run.name"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
