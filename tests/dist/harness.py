"""Gloo ranks that are started once a session and shared by all tests.

A rank imports torch and Megatron-Core for several seconds of processor time, a test body runs for one: so
the processes live as long as the session and bodies are sent to them. A body is a function of a module
that the ranks can import; it is called on each of the first `world` ranks, inside the process groups of a
layout, as `body(layout, platform, *args, **kwargs)`. Bodies, arguments and results are pickled between
processes that this module started itself.

    losses = ranks.run(loss_of, model_dir, expert=2)       # two ranks: the fewest that the layout needs
    losses = ranks.run(loss_of, model_dir, world=4, expert=2)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 4
_REPOSITORY = str(Path(__file__).resolve().parents[2])
_GRACE_SECONDS = 10.0
"""How long the peers of a failed rank may take to notice that it has gone, before they are killed."""


class RankFailure(AssertionError):
    """A body raised, or its process ended, on one rank. `rank` is the first one that did."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"rank {rank} failed:\n{report}")
        self.rank = rank


class RankTimeout(AssertionError):
    """A body did not end in time; the processes that ran it have been killed."""


class RankPool:
    """The ranks. Those that die are started again by the next `run`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection] | None] = [None] * SIZE
        self._ports = _free_ports()

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float = 120.0,
        **named: Any,
    ) -> list[Any]:
        """The body's result on each rank. Sizes of `parallel` (tensor, pipeline, context, expert,
        expert_tensor, data, sequence) are taken from the named arguments; the rest goes to the body."""
        from megagspo.config.schema import ParallelConfig

        sizes = {name: named.pop(name) for name in list(named) if name in ParallelConfig.model_fields}
        layout = ParallelConfig(**{"data": "auto", **sizes}).resolve(world)
        assert layout.world_size <= SIZE, f"{layout} needs more than {SIZE} ranks"
        members = range(layout.world_size)
        connections = {self._started(rank): rank for rank in members}
        port = next(self._ports)
        for connection in connections:
            connection.send((body, layout, port, args, named))
        return self._collect(connections, time.monotonic() + timeout, timeout)

    def _collect(self, waiting: dict[Connection, int], deadline: float, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        waiting = dict(waiting)
        while waiting:
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                succeeded, value = self._receive(connection, rank)
                if succeeded:
                    results[rank] = value
                    continue
                failures.append((rank, value))
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if waiting and time.monotonic() >= deadline:
                stuck = sorted(waiting.values())
                for rank in stuck:
                    self._kill(rank)
                if not failures:
                    raise RankTimeout(f"ranks {stuck} did not end within {timeout:g} s and were killed")
                break
        if failures:
            raise RankFailure(*failures[0])
        return [results[rank] for rank in sorted(results)]

    def _receive(self, connection: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            entry = self._ranks[rank]
            self._kill(rank)
            return False, f"its process ended with exit status {entry[0].exitcode if entry else None}"

    def _started(self, rank: int) -> Connection:
        entry = self._ranks[rank]
        if entry is None or not entry[0].is_alive():
            ours, theirs = self._context.Pipe()
            # Not a daemon: Megatron's checkpoint writers are children of their own.
            process = self._context.Process(target=_serve, args=(rank, theirs), name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._ranks[rank] = entry = (process, ours)
        return entry[1]

    def _kill(self, rank: int) -> None:
        entry, self._ranks[rank] = self._ranks[rank], None
        if entry is not None:
            process, connection = entry
            connection.close()
            process.kill()
            process.join()

    def processes(self) -> list[Any]:
        """The processes that are alive."""
        return [entry[0] for entry in self._ranks if entry is not None and entry[0].is_alive()]

    def close(self) -> None:
        """Asks every rank to end, kills those that do not, and waits for all of them."""
        for entry in self._ranks:
            if entry is not None:
                with contextlib.suppress(OSError):
                    entry[1].send(None)
        for rank, entry in enumerate(self._ranks):
            if entry is not None:
                entry[0].join(timeout=_GRACE_SECONDS)
                self._kill(rank)


def _free_ports() -> Iterator[int]:
    """Ports that nothing listens on, below the range from which systems give out ports of their own."""
    first = 15000 + os.getpid() % 10000
    for port in itertools.cycle(range(first, first + 5000)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


def _serve(rank: int, connection: Connection) -> None:
    """A rank's life: one body after the other, until the pipe closes."""
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    if _REPOSITORY not in sys.path:
        sys.path.insert(0, _REPOSITORY)
    from megagspo.platform.device import pick_platform

    platform = pick_platform("cpu")
    importlib.import_module("megagspo.policy.policy")  # all that a body needs, once

    gc.freeze()  # what is there now stays: `_free_models` need not look at it
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        except Exception:  # a body that cannot be imported: the test is to fail, not the rank
            connection.send((False, traceback.format_exc()))
            continue
        if task is None:
            return
        try:
            answer = (True, _call(rank, platform, *task))
        except BaseException:
            answer = (False, traceback.format_exc())
        task = None
        _free_models()
        try:
            connection.send(answer)
        except Exception:
            connection.send((False, traceback.format_exc()))


def _free_models() -> None:
    """Takes the models of the last body apart, and with them their process groups, each of which holds
    several threads.

    Gradient hooks hold Megatron's DistributedDataParallel, which holds the hooks' nodes of the autograd
    graph, as do the token dispatchers: circles that the garbage collector does not see. One model a
    process is no matter, one a body is."""
    from megatron.core.distributed import DistributedDataParallel

    for wrapper in [thing for thing in gc.get_objects() if isinstance(thing, DistributedDataParallel)]:
        for module in list(wrapper.modules()):
            module.__dict__.clear()
    gc.collect()


def _call(
    rank: int,
    platform: Any,
    body: Callable[..., Any],
    layout: Any,
    port: int,
    args: tuple[Any, ...],
    named: Any,
) -> Any:
    from megagspo.platform.distributed import process_groups
    from megagspo.platform.world import World

    os.environ["MASTER_PORT"] = str(port)
    world = World(rank=rank, size=layout.world_size, local_rank=rank)
    with process_groups(layout, platform, world, seed=0):
        return body(layout, platform, *args, **named)
