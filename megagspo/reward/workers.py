"""A small pool of processes for judges that may hang, crash or eat memory.

Threads cannot be killed, and timeouts by signal work in the main thread only; a process can always be ended.
So a response on which the judge hangs costs its time limit and one worker's start, never the pool. Processes
come from `subprocess`, not `multiprocessing`: no import of the caller's main module, and daemonic processes
may have them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megagspo
from megagspo.errors import MegagspoError

START_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Verdict:
    """score is None when the judge gave none, and reason then says why."""

    score: Any
    reason: str | None = None


class WorkerPool:
    """Runs `judge` (`module:function`; keyword arguments and result JSON-able) on many inputs at a time.

    time_limit: processor seconds an input may take. Workers start on first use. `run` may be called from any
    thread.
    """

    def __init__(self, judge: str, *, workers: int | None = None, time_limit: float = 5.0) -> None:
        self._judge = judge
        self._time_limit = time_limit
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        # A thread only waits for a process: as many as there are processes at work.
        size = workers or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward")

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict an input, in order, whatever happens to workers. Raises when none can be started."""
        return list(self._threads.map(self._run_one, inputs))

    def close(self) -> None:
        """Ends the workers; the pool cannot be used again."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    def _run_one(self, arguments: Mapping[str, Any]) -> Verdict:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.alive:
            worker = _Worker(self._judge, self._time_limit)
        verdict = worker.judge(arguments)
        if worker.alive:
            with self._lock:
                self._idle.append(worker)
        return verdict


class _Worker:
    """One process running `worker.py`. Dead after an input on which it hung or crashed."""

    def __init__(self, judge: str, time_limit: float) -> None:
        self._time_limit = time_limit
        package_root = str(Path(megagspo.__file__).parent.parent)
        python_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        # One thread, as many workers run; a fixed hash seed, as sympy's way to a result may hang on it.
        environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megagspo.reward.worker", judge, str(time_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is the caller's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._answer(START_LIMIT_SECONDS).strip() != b"ready":
            status = self.end()
            raise MegagspoError(
                f"a worker process for {judge} did not start (exit status {status}); its own message is above"
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def judge(self, arguments: Mapping[str, Any]) -> Verdict:
        """The verdict on one input. Never raises: death and silence are verdicts too."""
        try:
            self._in.write(json.dumps(arguments).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            return Verdict(None, f"the worker died before it began (exit status {self.end()})")
        # The worker ends itself by processor time; this bound is for one that sleeps, so it can be generous.
        line = self._answer(30 + 10 * self._time_limit)
        if not line.endswith(b"\n"):
            status = self.end()
            if status in (-signal.SIGPROF, -signal.SIGKILL):
                return Verdict(None, f"no verdict within {self._time_limit:g} s of processor time")
            return Verdict(None, f"the worker crashed (exit status {status})")
        answer = json.loads(line)
        return Verdict(answer.get("score"), answer.get("error"))

    def end(self) -> int:
        """Kills the process if it still runs, and returns its exit status."""
        if select.select([self._out], [], [], 0)[0]:  # end of output: it is about to end by its own cause
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self._process.kill()
        status = self._process.wait()
        self._out.close()
        with contextlib.suppress(BrokenPipeError):  # what it did not read is lost with it
            self._in.close()
        return status

    def _answer(self, seconds: float) -> bytes:
        """The next line of output; empty at its end, or when none comes in time."""
        if not select.select([self._out], [], [], seconds)[0]:
            return b""
        return self._out.readline()
