"""A policy whose state was in host memory goes on as one whose state never moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import RankPool
from tests.dist.learner import make_policy, update, weights_of


def updates(
    layout: Any, platform: Any, model: Path, dtype: str, moving: bool
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Two updates, the state moved out and back between them."""
    from megagspo.policy.host_memory import state_tensors

    policy = make_policy(layout, platform, model, model={"dtype": dtype})
    reports = [update(policy, seed=0)]
    if moving:
        held = sum(p.numel() * p.element_size() for c in policy.chunks for p in c.parameters())
        assert policy.lend_device() >= held
        left = {t.untyped_storage().nbytes() for t in state_tensors(policy.chunks, policy.optimizer)}
        assert left == {0}
        policy.take_back_device()
    reports.append(update(policy, seed=1))
    return reports, weights_of(policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout", [{}, {"data": 2}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}], ids=str
)
def test_an_update_after_a_stay_in_host_memory_is_bit_equal(
    ranks: RankPool, moe_dir: Path, layout: dict[str, int], dtype: str
) -> None:
    stayed = ranks.run(updates, moe_dir, dtype, False, **layout)
    moved = ranks.run(updates, moe_dir, dtype, True, **layout)
    for (reports, weights), (expected_reports, expected) in zip(moved, stayed, strict=True):
        assert reports == expected_reports
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
