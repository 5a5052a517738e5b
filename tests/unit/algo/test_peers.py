"""Agreement with TRL and verl where definitions coincide, on drawn inputs: loss, gradient, clipped tokens,
KL, advantages. Where they do not: test_peer_differences.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megagspo.algo.advantages import advantages
from megagspo.algo.kl import kl_estimate
from megagspo.config.algorithm import AdvantageConfig
from tests.unit.algo.peers import (
    Case,
    agree,
    clipped_share,
    peer,
    trl_loss,
    verl_advantages,
    verl_core,
    verl_loss,
)

SEEDS = range(4)
TRL = [  # ours, TRL's
    ({"name": "gspo"}, {"level": "sequence", "low": 3e-4, "high": 4e-4}),
    ({"name": "gspo_token"}, {"level": "sequence", "low": 3e-4, "high": 4e-4}),
    ({"name": "grpo"}, {}),
    ({"name": "grpo", "clip_high": 0.27}, {"high": 0.27}),
    ({"name": "grpo", "dual_clip": 1.5}, {"delta": 1.5}),
    ({"name": "grpo", "aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    ({"name": "dapo"}, {"loss_type": "dapo", "high": 0.28}),
    ({"name": "dr_grpo", "length_constant": 8}, {"loss_type": "dr_grpo"}),
    ({"name": "cispo", "clip_high": 0.2}, {"loss_type": "cispo", "high": 1.2}),
    ({"name": "grpo", "kl": {"coefficient": 0.1}}, {"beta": 0.1}),
    (
        {"name": "gspo", "kl": {"coefficient": 0.1}},
        {"level": "sequence", "low": 3e-4, "high": 4e-4, "beta": 0.1},
    ),
    ({"name": "grpo", "off_policy_mask": {"threshold": 0.02}}, {"threshold": 0.02}),
]


@pytest.mark.parametrize(("mine", "theirs"), TRL, ids=lambda keys: str(keys))
@pytest.mark.parametrize("seed", SEEDS)
def test_trl_gives_the_same_loss_and_gradient(mine: Any, theirs: Any, seed: int) -> None:
    """With masked tokens inside responses and padding behind them."""
    case = Case(mine["name"], seed)
    outcome = case.ours(**mine)
    loss, _ = trl_loss(case, case.advantages(outcome), **theirs)
    agree(case, outcome, loss)


def test_trl_takes_the_same_deviation() -> None:
    """Divided by n - 1 (ddof 1), as ours."""
    nanstd = peer("trl.trainer.utils").nanstd
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.5], dtype=torch.float64)
    centred = rewards - rewards.mean()
    found = advantages(rewards.tolist(), ["g"] * 4, AdvantageConfig(eps=1e-4))
    # TRL takes n / (n - 1) in float32
    assert found == pytest.approx((centred / (nanstd(rewards) + 1e-4)).tolist(), rel=1e-7)


SEQUENCE: dict[str, Any] = {"policy": "gspo", "low": 3e-4, "high": 4e-4}
VERL = [  # ours, verl's
    ({"name": "gspo"}, SEQUENCE),
    ({"name": "gspo_token"}, SEQUENCE),
    ({"name": "grpo"}, {}),
    ({"name": "grpo", "dual_clip": 1.5}, {"dual_clip": 1.5}),
    ({"name": "dapo"}, {"aggregation": "token-mean", "high": 0.28}),
    (
        {"name": "dr_grpo", "length_constant": 8},
        {"aggregation": "seq-mean-token-sum-norm", "divisor": 8},
    ),
    (
        {"name": "cispo", "clip_high": 0.2},
        {"policy": "cispo", "aggregation": "token-mean", "low": 1.0},
    ),
]


@pytest.mark.parametrize(("mine", "theirs"), VERL, ids=lambda keys: str(keys))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("masked_in_full", [False, True])
def test_verl_gives_the_same_loss_and_gradient(
    mine: Any, theirs: Any, seed: int, masked_in_full: bool
) -> None:
    """With masked tokens inside responses, padding behind them, and a response masked in full."""
    case = Case(mine["name"], seed, masked_in_full=masked_in_full)
    outcome = case.ours(**mine)
    loss, metrics = verl_loss(case, case.advantages(outcome), **theirs)
    agree(case, outcome, loss, rel=2e-8)  # verl adds 1e-8 to numbers of tokens
    if mine["name"] != "cispo" and "dual_clip" not in mine:
        assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped_share(outcome, case), rel=2e-8)


@pytest.mark.parametrize(("name", "theirs"), [("gspo_token", SEQUENCE), ("grpo", {})])
def test_verl_multiplies_by_correction_weights_alike(name: str, theirs: Any) -> None:
    case = Case(name, 0)
    outcome = case.ours(name, correction={"mode": "truncate", "high": 1.1})
    weights = (case.matrix("old_logprobs") - case.matrix("rollout_logprobs")).exp().clamp(max=1.1)
    loss, _ = verl_loss(case, case.advantages(outcome), weights=weights, **theirs)
    agree(case, outcome, loss, rel=2e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_verl_estimates_kl_alike_near_the_reference(estimator: Any) -> None:
    case = Case("grpo", 0)
    reference = case.matrix("ref_logprobs")
    found = kl_estimate(case.train, reference, estimator=estimator, log_ratio_max=20.0)
    assert found.tolist() == [
        pytest.approx(row, rel=1e-10, abs=1e-14)
        for row in verl_core().kl_penalty(case.train, reference, estimator).tolist()
    ]


REWARDS, GROUPS = [1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.75], list("abababa")


def test_verl_centres_and_scales_groups_alike() -> None:
    found = verl_advantages(verl_core().compute_grpo_outcome_advantage, REWARDS, GROUPS)
    assert found == pytest.approx(advantages(REWARDS, GROUPS), rel=1e-5)  # float32
    unscaled = verl_advantages(
        verl_core().compute_grpo_outcome_advantage, REWARDS, GROUPS, norm_adv_by_std_in_grpo=False
    )
    assert unscaled == pytest.approx(advantages(REWARDS, GROUPS, AdvantageConfig(scale="none")), abs=1e-6)


def test_verl_leaves_one_out_alike() -> None:
    found = verl_advantages(verl_core().compute_rloo_outcome_advantage, REWARDS, GROUPS)
    config = AdvantageConfig(baseline="leave_one_out", scale="none")
    assert found == pytest.approx(advantages(REWARDS, GROUPS, config), abs=1e-6)
