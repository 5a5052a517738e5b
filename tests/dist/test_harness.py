"""The ranks themselves: failures and time-outs reach the test, and the ranks work again afterwards."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import RankFailure, RankPool, RankTimeout


def sum_of_ranks(layout: Any, platform: Any, offset: int) -> float:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return float(total)


def fail_on_one(layout: Any, platform: Any) -> None:
    if dist.get_rank() == 1:
        raise ValueError("the message of rank 1")
    dist.barrier()


def hang_on_one(layout: Any, platform: Any) -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def end_the_process(layout: Any, platform: Any) -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def process_id(layout: Any, platform: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_returns_its_result(ranks: RankPool, world: int) -> None:
    expected = sum(range(world)) + 10.0 * world
    assert ranks.run(sum_of_ranks, 10, world=world) == [expected] * world


def test_processes_are_shared_by_bodies(ranks: RankPool) -> None:
    assert ranks.run(process_id, world=2) == ranks.run(process_id, world=4)[:2]


def test_exception_is_raised_with_rank_and_traceback_and_ranks_go_on(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed.*fail_on_one.*the message of rank 1") as caught:
        ranks.run(fail_on_one, world=2)
    assert caught.value.rank == 1
    assert ranks.run(sum_of_ranks, 0, world=4) == [6.0] * 4


def test_time_out_kills_the_ranks_of_the_body_that_hang_and_no_other(ranks: RankPool) -> None:
    before = ranks.run(process_id, world=4)
    with pytest.raises(RankTimeout, match=r"ranks \[1\]"):
        ranks.run(hang_on_one, world=2, timeout=2)
    after = ranks.run(process_id, world=4)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True]


def test_end_of_a_process_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 failed.*exit status 7"):
        ranks.run(end_the_process, world=1)


def test_no_process_is_left_when_the_pool_closes() -> None:
    pool = RankPool()
    pool.run(process_id, world=1)
    processes = pool.processes()
    pool.close()
    assert len(processes) == 1
    assert not processes[0].is_alive()
