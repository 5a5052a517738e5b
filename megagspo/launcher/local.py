"""Starts the ranks of a run on this machine, and ends all of them when one ends badly."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megagspo.errors import writing
from megagspo.observe.run_directory import HELD, RunDirectory

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0
_FIRST_RANK_SECONDS = 10.0
LAUNCHED = "MEGAGSPO_LAUNCHED"
"""Set in the environment of ranks that this launcher started, which has said already what there was to
say."""


def run_ranks(arguments: Sequence[str], *, ranks: int, threads: int, directory: RunDirectory) -> int:
    """Runs `python -m megagspo ARGUMENTS` as so many ranks and returns the exit status of the first that
    failed, or 0.

    Rank 0 writes to this terminal, the others to `logs/rank_001.log` and so on in the run's directory, which
    is locked before they start. Ranks die with this process, however it ends; each holds the lock as long as
    it lives.
    """
    with directory.locked() as lock:
        with writing(directory.logs):
            directory.logs.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": str(threads),
            LAUNCHED: "1",
            HELD: str(directory.root.absolute()),
        }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start(arguments, rank, environment, lock, directory.logs))
            return _wait(processes, directory.logs)
        finally:
            _end(processes)


def _start(
    arguments: Sequence[str], rank: int, environment: dict[str, str], lock: int, logs: Path
) -> subprocess.Popen[bytes]:
    output = None
    if rank > 0:
        with writing(_log(logs, rank)):
            output = _log(logs, rank).open("a")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "megagspo", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=(lock,),
            preexec_fn=_die_with_parent,
        )
    finally:
        if output:
            output.close()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank_{rank:03d}.log"


def yield_to_first_rank() -> None:
    """For a rank about to report a mistake, which the first rank sees as well: it speaks for all, and the
    launcher then ends this one. Returns where that does not happen in time, and in any other process."""
    if LAUNCHED in os.environ and os.environ["RANK"] != "0":
        time.sleep(_FIRST_RANK_SECONDS)


def _wait(processes: list[subprocess.Popen[bytes]], logs: Path) -> int:
    """Until all ranks have ended well, or one has not. Rank 0 is given a moment to explain a failure it
    shares."""
    while True:
        states = [process.poll() for process in processes]
        failed = [(rank, state) for rank, state in enumerate(states) if state]
        if failed:
            rank, state = failed[0]
            if rank > 0 and state > 0 and _explained_by_first(processes[0]):
                return state
            if rank > 0:
                _explain(rank, state, _log(logs, rank))
            elif state < 0:
                print(f"error: rank 0 was ended by {signal.Signals(-state).name}", file=sys.stderr)
            return state if state > 0 else 1
        if all(state == 0 for state in states):
            return 0
        time.sleep(0.05)


def _explained_by_first(first: subprocess.Popen[bytes]) -> bool:
    """Whether rank 0 fails of its own, as it does of a mistake that every rank sees: then it has said why."""
    try:
        return first.wait(timeout=_GRACE_SECONDS) > 0
    except subprocess.TimeoutExpired:
        return False


def _explain(rank: int, state: int, log: Path) -> None:
    how = f"was ended by {signal.Signals(-state).name}" if state < 0 else f"ended with status {state}"
    tail = log.read_text(errors="replace").splitlines()[-20:]
    print(
        "\n".join([f"error: rank {rank} {how}; the end of {log}:", *("  " + line for line in tail)]),
        file=sys.stderr,
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Asks what still runs to end, then ends it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    """Linux ends this rank when the launcher ends, even by SIGKILL: no rank is left training on its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
