"""A run's directory: its files' names, the command it belongs to, the lock that keeps a second run out."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megagspo.config import changes
from megagspo.errors import ConfigError, writing

HELD = "MEGAGSPO_RUN_LOCKED"
"""Set in the environment of ranks whose launcher holds the lock: the directory that it is of."""

_LAST_BREATH_SECONDS = 10.0
"""How long the ranks of a command that was killed may take to end."""


class RunDirectory:
    """`runs/NAME/`, as DESIGN lays it out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.checkpoints = root / "checkpoints"
        self.hf = root / "hf"
        self.rollouts = root / "rollouts"
        self.failed = root / "failed"
        self.logs = root / "logs"

    def saved_state(self) -> dict[str, Any]:
        """What the checkpoint that `latest` names says of the run; empty without one. A glance before
        anything is started: which checkpoint is loaded is decided by `CheckpointDirectory.newest`."""
        try:
            latest = (self.checkpoints / "latest").read_text().strip()
            return json.loads((self.checkpoints / latest / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def refuse_other_command(self, command: str, state: dict[str, Any]) -> None:
        """Raises ConfigError when `state`, of a checkpoint of this run, was saved by another command."""
        other = state.get("command", command)
        if other != command:
            raise ConfigError(
                f"run directory {self.root} holds a run of `megagspo {other}`, with which "
                f"`megagspo {command}` cannot go on: choose another run.name, and set "
                f"model.path={self.hf} to start from what it learned"
            )

    def remember(self, config: str) -> list[str]:
        """Writes the resolved configuration; returns what changed since the run was last started."""
        try:
            changed = changes(self.config.read_text(), config)
        except (OSError, yaml.YAMLError):  # none yet, or cut short by a crash
            changed = []
        partial = self.config.with_name("config.yaml.partial")
        with writing(self.config):
            partial.write_text(config)
            os.replace(partial, self.config)
        return changed

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Holds the directory for this process and those that inherit the file descriptor it gives.

        Raises UnwritableError when the directory cannot be written, ConfigError when another run holds it.
        The lock belongs to open files, so a run that was killed leaves none behind. Ranks whose launcher
        holds it for them are let in.
        """
        if os.environ.get(HELD) == str(self.root.absolute()):
            yield -1
            return
        with writing(self.root, what="run directory"):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take(lock)
            with writing(self.root, what="run directory"):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
            yield lock
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        deadline = time.monotonic() + _LAST_BREATH_SECONDS
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid, _, host = os.pread(lock, 1000, 0).decode(errors="replace").strip().partition(" ")
                if _has_ended(pid, host) and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                holder = f"process {pid} on {host}" if host else "another process"
                raise ConfigError(
                    f"run directory {self.root} is in use by {holder}: wait for it to end, or choose another "
                    "run.name"
                ) from error
            except OSError as error:  # some cluster file systems are mounted without it
                raise ConfigError(
                    f"run directory {self.root} is on a file system without locks ({error.strerror}), so two "
                    "runs could write to it at once: change run.dir"
                ) from error


def _has_ended(pid: str, host: str) -> bool:
    """Whether the process that took the lock is known to be gone: then its ranks are about to follow it."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
