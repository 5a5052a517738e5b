"""Where TRL and verl define things otherwise: each line of the table in megagspo/algo/README.md, on the
peer's own code."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagspo.algo.advantages import advantages, token_advantages
from megagspo.algo.kl import kl_estimate
from megagspo.config.algorithm import AlgorithmConfig
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

SEQUENCE: dict[str, Any] = {"policy": "gspo", "low": 3e-4, "high": 4e-4}


def test_trl_counts_clipped_tokens_alike_but_clipped_sequences_for_gspo() -> None:
    case = Case("grpo", 0)
    outcome = case.ours("grpo")
    _, metrics = trl_loss(case, case.advantages(outcome))
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped_share(outcome, case)) != 0
    case = Case("gspo", 0)
    outcome = case.ours("gspo")
    _, metrics = trl_loss(case, case.advantages(outcome), level="sequence", low=3e-4, high=4e-4)
    of_sequences = sum(map(any, outcome.clipped)) / len(outcome.clipped)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(of_sequences)
    assert of_sequences != pytest.approx(clipped_share(outcome, case))


def test_trl_does_not_count_what_its_second_bound_clips() -> None:
    """Ours is on the clipped side there: no gradient passes."""
    case = Case("grpo", 1, far=5.0)
    free, outcome = case.ours("grpo"), case.ours("grpo", dual_clip=1.5)
    _, metrics = trl_loss(case, case.advantages(outcome), delta=1.5)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped_share(free, case))
    assert clipped_share(outcome, case) > clipped_share(free, case)


def test_trl_counts_cut_cispo_weights_for_positive_advantages_alone() -> None:
    case = Case("cispo", 2)
    outcome = case.ours("cispo", clip_high=0.2)
    given = case.advantages(outcome)
    _, metrics = trl_loss(case, given, loss_type="cispo", high=1.2)
    positive = sum(sum(row) for row, sign in zip(outcome.clipped, given.tolist(), strict=True) if sign > 0)
    share = positive / float(case.mask.sum())
    assert metrics["cispo_clip_ratio"] == pytest.approx(share)
    assert share < clipped_share(outcome, case)


def test_trl_keeps_a_response_masked_in_full_in_the_mean_over_responses() -> None:
    """Six responses of which one has no token: divided by 6 there, by 5 here."""
    case = Case("grpo", 3, masked_in_full=True)
    outcome = case.ours("grpo")
    loss, _ = trl_loss(case, case.advantages(outcome))
    assert loss.item() * 6 / 5 == pytest.approx(outcome.loss, rel=1e-12)


def test_trl_multiplies_kl_by_the_ratio_where_asked() -> None:
    """Its default from 1.16 on; here KL is multiplied by nothing."""
    case = Case("grpo", 0)
    outcome = case.ours("grpo", kl={"coefficient": 0.1})
    given = case.advantages(outcome)
    loss, _ = trl_loss(case, given, beta=0.1, corrected_kl=True)
    assert loss.item() != pytest.approx(outcome.loss, rel=1e-6)
    assert peer("trl").GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True


def test_trl_lets_a_log_ratio_grow_without_bound() -> None:
    """1000 at A < 0: no finite loss there; kept within log_ratio_max here."""
    case = Case("grpo", 0)
    for sample in case.samples:
        sample["old_logprobs"] = [value - 1000 for value in sample["train_logprobs"]]
    outcome = case.ours("grpo")
    loss, _ = trl_loss(case, case.advantages(outcome))
    assert not math.isfinite(loss.item())
    assert math.isfinite(outcome.loss)


def test_verl_corrects_gspo_token_by_token_in_the_gradient() -> None:
    """Its GSPO is our gspo_token: a weight a token stays with that token's gradient. In our gspo every token
    has a part in the one ratio, and the gradient gets the response's mean weight; a weight a response is the
    same in both."""
    case = Case("gspo", 0, far=0.0)  # nothing clipped
    token = case.ours("gspo", correction={"mode": "truncate", "high": 1.1})
    difference = case.matrix("old_logprobs") - case.matrix("rollout_logprobs")
    loss, _ = verl_loss(case, case.advantages(token), weights=difference.exp().clamp(max=1.1), **SEQUENCE)
    assert loss.item() == pytest.approx(token.loss, abs=2e-8)
    slopes = case.gradient(loss)
    assert slopes[1] != pytest.approx(token.gradients[1], rel=1e-3)
    assert [sum(row) for row in slopes] == pytest.approx([sum(row) for row in token.gradients], rel=2e-8)

    how = {"mode": "truncate", "level": "sequence", "high": 1.1}
    whole = case.ours("gspo", correction=how)
    mean = ((difference * case.mask).sum(1) / case.mask.sum(1)).exp().clamp(max=1.1)
    weights = mean[:, None].expand_as(case.mask)
    loss, _ = verl_loss(case, case.advantages(whole), weights=weights, **SEQUENCE)
    agree(case, whole, loss, rel=2e-8)


def test_verl_averages_gspo_over_tokens_unless_told() -> None:
    """Its configuration says token-mean: long responses weigh more, which is refused here."""
    actor = peer("verl.workers.config").ActorConfig
    assert actor.__dataclass_fields__["loss_agg_mode"].default == "token-mean"
    case = Case("gspo", 0)
    outcome = case.ours("gspo")
    given = case.advantages(outcome)
    by_token, _ = verl_loss(case, given, aggregation="token-mean", **SEQUENCE)
    assert by_token.item() != pytest.approx(outcome.loss, rel=1e-3)


def test_verl_bounds_ppo_twice_unless_told() -> None:
    """Dual clip at 3 is always on there; here it is off unless asked for."""
    actor = peer("verl.workers.config").ActorConfig
    assert actor.__dataclass_fields__["clip_ratio_c"].default == 3.0
    case = Case("grpo", 1, far=8.0)
    given = case.advantages(case.ours("grpo"))
    loss, metrics = verl_loss(case, given, dual_clip=3.0)
    assert loss.item() == pytest.approx(case.ours("grpo", dual_clip=3.0).loss, rel=2e-8)
    assert loss.item() < case.ours("grpo").loss
    # and what it clips is counted apart
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped_share(case.ours("grpo"), case), rel=2e-8)
    assert metrics["actor/pg_clipfrac_lower"] > 0


def test_verl_raises_small_cispo_weights() -> None:
    """To 1 - clip_ratio_low; here, as in the paper, there is no lower bound, and one is refused."""
    case = Case("cispo", 0)
    outcome = case.ours("cispo", clip_high=0.2)
    given = case.advantages(outcome)
    loss, _ = verl_loss(case, given, policy="cispo", aggregation="token-mean")
    assert loss.item() != pytest.approx(outcome.loss, rel=1e-3)


def test_verl_cuts_k3_at_ten() -> None:
    """The estimate, with gradient 0 from there on: a policy 5 nats below its reference is pulled back no
    more. Here the log-ratio is cut, at 20."""
    new = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    theirs = verl_core().kl_penalty(new, zero, "k3")
    ours = kl_estimate(new, zero, estimator="k3", log_ratio_max=20.0)
    assert theirs.item() == 10
    assert torch.autograd.grad(theirs.sum(), new)[0].item() == 0
    assert ours.item() == pytest.approx(math.exp(5) - 6)
    assert torch.autograd.grad(ours.sum(), new)[0].item() == pytest.approx(1 - math.exp(5))


def test_verl_gives_a_group_of_one_its_reward() -> None:
    """As if its baseline were 0 and its deviation 1; here it is 0, there being nothing to compare with."""
    assert verl_advantages(verl_core().compute_grpo_outcome_advantage, [1.0, 3.0, 5.0], list("aab"))[2] == (
        pytest.approx(5.0, rel=1e-5)
    )
    assert verl_advantages(verl_core().compute_rloo_outcome_advantage, [1.0, 3.0, 5.0], list("aab"))[2] == 5.0
    assert advantages([1.0, 3.0, 5.0], list("aab"))[2] == 0.0


def test_verl_learns_from_the_rounding_of_a_constant_group() -> None:
    """Fifteen rewards of 0.35 in float32: their mean is not 0.35. Here exactly 0."""
    found = verl_advantages(verl_core().compute_grpo_outcome_advantage, [0.35] * 15, ["a"] * 15)
    assert all(found)
    assert advantages([0.35] * 15, ["a"] * 15) == [0.0] * 15


def test_verl_whitens_tokens_where_responses_count_here() -> None:
    """REINFORCE++ on responses of 1 and 3 tokens: there the mean over four tokens, here over two
    responses."""
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    found, _ = verl_core().compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, config=SimpleNamespace(gamma=1.0)
    )
    assert found[0, 0].item() == pytest.approx(1.5)  # (1 - 1/4) / (1/2)
    config = AlgorithmConfig(name="reinforce_pp").advantage
    ours = token_advantages([[1.0], [0.0] * 3], ["a", "b"], config)
    assert ours[0][0] == pytest.approx(0.5**0.5, rel=1e-5)  # (1 - 1/2) / sqrt(1/2)


def test_verl_counts_a_response_without_tokens_in_its_group() -> None:
    """A3: rewards 1, 1, 0, 0, the second without a token to learn from."""
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None]
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]
    found, _ = verl_core().compute_grpo_outcome_advantage(scores.clone(), mask, ["a"] * 4)
    centred = advantages([1.0, 0.0, 0.0], ["a"] * 3)
    assert found[:, 0].tolist() == pytest.approx([0.866, 0.0, -0.866, -0.866], abs=1e-3)
    assert centred == pytest.approx([1.155, -0.577, -0.577], abs=1e-3)


def test_verl_bounds_gspos_log_ratio_at_ten_and_from_above_alone() -> None:
    """Ours within 20 on both sides, as token ratios are in both."""
    case = Case("gspo", 0)
    for sample in case.samples:
        sample["old_logprobs"] = [value - 15 for value in sample["train_logprobs"]]
    outcome = case.ours("gspo")
    given = case.advantages(outcome)
    loss, _ = verl_loss(case, given, **SEQUENCE)
    losers = [value for value in outcome.advantages if value < 0]  # type: ignore[operator]
    winners = [value for value in outcome.advantages if value > 0]  # type: ignore[operator]
    for found, most in ((loss.item(), 10), (outcome.loss, 15)):
        expected = -(sum(losers) * math.exp(most) + sum(winners) * (1 + 4e-4)) / 6  # type: ignore[arg-type]
        assert found == pytest.approx(expected, rel=1e-7)
    for sample in case.samples:
        sample["old_logprobs"] = [value - 200 for value in sample["train_logprobs"]]
    tokens, _ = verl_loss(case, given)
    assert tokens.item() == pytest.approx(case.ours("grpo").loss, rel=1e-7)
