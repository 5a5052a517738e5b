"""Activations that backward computes again: the same gradients, and the work is really done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import RankPool
from tests.dist.learner import gradients_of, make_batch, make_objective, make_policy
from tests.dist.models import make_sequences

LAYOUTS: dict[str, dict[str, int]] = {
    "one_rank": {},
    "tp2_ep2": {"tensor": 2, "expert": 2},
    "cp2_ep2": {"context": 2, "expert": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}


def gradients_and_calls(
    layout: Any, platform: Any, model: Path, recompute: str
) -> tuple[float, dict[str, Tensor], dict[str, int]]:
    """Loss, gradients, and how often layers' attention and MLPs were called."""
    policy = make_policy(
        layout, platform, model, trainer={"recompute": recompute, "tokens_per_microbatch": 48}
    )
    calls = {"self_attention": 0, "mlp": 0}

    def counted(kind: str) -> Any:
        def count(*_: Any) -> None:
            calls[kind] += 1

        return count

    for chunk in policy.chunks:
        for name, module in chunk.named_modules():
            if name.endswith(".linear_qkv"):
                module.register_forward_hook(counted("self_attention"))
            elif name.endswith((".router", ".mlp.linear_fc1")):
                module.register_forward_hook(counted("mlp"))
    gradient = policy.forward_backward(make_batch(make_sequences(9)), make_objective(), temperature=1.0)
    return gradient.loss, gradients_of(policy), calls


@pytest.mark.parametrize(
    ("model", "layout"), [("moe_dir", name) for name in LAYOUTS] + [("dense_dir", "one_rank")]
)
def test_gradient_is_bit_equal_with_and_without_recompute(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, layout: str
) -> None:
    directory = request.getfixturevalue(model)
    loss, gradients, calls = ranks.run(gradients_and_calls, directory, "none", **LAYOUTS[layout])[0]
    times = {"full": {"self_attention": 2, "mlp": 2}, "selective": {"self_attention": 1, "mlp": 2}}
    for recompute, expected in times.items():
        for found in ranks.run(gradients_and_calls, directory, recompute, **LAYOUTS[layout]):
            assert found[0] == loss
            for name, gradient in gradients.items():
                assert torch.equal(found[1][name], gradient), name
            assert found[2] == {kind: calls[kind] * expected[kind] for kind in calls}
