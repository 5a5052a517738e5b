"""The learning rate as a function of the number of updates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megagspo.config.schema import Config
from megagspo.policy.optimizer import build_schedule


def schedule(total_updates: int, **optimizer: Any) -> tuple[Any, torch.optim.Optimizer]:
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": [{"reasoning_gym": "gcd"}]}, "optimizer": optimizer}
    )
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    return build_schedule(adam, config, total_updates), adam


def rate(adam: torch.optim.Optimizer) -> float:
    return adam.param_groups[0]["lr"]


def test_resumed_schedule_stands_where_it_stood() -> None:
    """E1: 2 updates a step, ten steps done, linear from 1e-6 to 0 over 320 samples of batch 8, which are
    40 updates."""
    running, adam = schedule(40, lr=1e-6, schedule="linear")
    for _ in range(20):
        running.step(increment=1)
    assert rate(adam) == pytest.approx(5.0e-7, rel=1e-12)
    resumed, resumed_adam = schedule(40, lr=1e-6, schedule="linear")
    resumed.num_steps = 0
    resumed.step(increment=20)
    assert resumed.num_steps == 20
    assert rate(resumed_adam) == rate(adam)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_rate_is_the_formulas_at_every_update(name: str) -> None:
    total, warmup, top, bottom = 30, 5, 1e-3, 1e-4
    running, adam = schedule(total, lr=top, lr_min=bottom, warmup_steps=warmup, schedule=name)
    for update in range(total + 10):
        if update < warmup:
            expected = top * update / warmup
        elif name == "constant":
            expected = top
        else:
            done = min(1.0, (update - warmup) / (total - warmup))
            share = 1 - done if name == "linear" else (1 + math.cos(math.pi * done)) / 2
            expected = bottom + (top - bottom) * share
        assert rate(adam) == pytest.approx(expected, rel=1e-12)
        running.step(increment=1)


def test_warm_up_longer_than_the_run_is_a_rising_rate() -> None:
    running, adam = schedule(3, lr=1.0, warmup_steps=10, schedule="linear")
    running.step(increment=3)
    assert rate(adam) == pytest.approx(0.3)
