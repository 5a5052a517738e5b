"""What is added to every objective alike: correction, off-policy masking, KL, entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megagspo.algo.kl import kl_estimate
from megagspo.algo.losses import LOSSES, objective_of
from megagspo.algo.losses.likelihood import likelihood
from megagspo.algo.objective import Terms, TokenBatch
from megagspo.config.algorithm import AlgorithmName
from tests.unit.algo.batches import (
    ADVANTAGES,
    LENGTHS,
    NAMES,
    loss_and_gradient,
    make_batch,
    random_rows,
    settings,
    sides,
    transcribed,
)

TRAIN, OLD = random_rows(1e-3)
REFERENCE, _ = random_rows(0.0, seed=3)
ROLLOUT = random_rows(0.1, seed=0)[1]  # near the policy, 0.1 apart


def batch_of(**more: Any) -> Any:
    return make_batch(TRAIN, OLD, ADVANTAGES, dtype=torch.float64, **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_added_to_every_objective_and_multiplied_by_nothing(
    name: AlgorithmName, estimator: Any
) -> None:
    """The difference to the loss without it is coefficient x weighted KL, in value and gradient, whatever
    ratios, advantages and corrections are."""
    config = settings(name, kl={"coefficient": 0.3, "estimator": estimator})
    corrections = [torch.full((length,), 0.5) for length in LENGTHS]
    with_kl, without = (
        loss_and_gradient(batch_of(ref_logprobs=REFERENCE, corrections=corrections), c)
        for c in (config, settings(name))
    )

    def only_kl(batch: TokenBatch) -> Terms:
        reference = torch.cat(REFERENCE).double()
        estimate = kl_estimate(batch.train_logprobs, reference, estimator=estimator, log_ratio_max=20.0)
        return replace(likelihood(batch), loss=estimate)

    alone = loss_and_gradient(batch_of(), config, only_kl)
    assert with_kl[0] - without[0] == pytest.approx(0.3 * alone[0], rel=1e-10)
    assert (with_kl[1] - without[1]).tolist() == pytest.approx((0.3 * alone[1]).tolist(), rel=1e-9, abs=1e-14)
    assert sides(with_kl[2]) == sides(without[2])


@pytest.mark.parametrize("name", NAMES)
def test_a_kl_coefficient_is_never_ignored(name: AlgorithmName) -> None:
    """In the loss it needs a reference, and fails without one."""
    with pytest.raises(AssertionError):
        objective_of(settings(name, kl={"coefficient": 0.1}))(batch_of())


@pytest.mark.parametrize("name", NAMES)
def test_corrections_multiply_the_term_of_every_objective(name: AlgorithmName) -> None:
    """The sequence ones too: loss and gradient are the transcription's, clipping and ratio are as without."""
    how = {"mode": "truncate", "high": 1.05}
    config = settings(name, correction=how)
    weights = [(old - roll).double().exp().clamp(max=1.05) for old, roll in zip(OLD, ROLLOUT, strict=True)]
    loss, gradient, terms = loss_and_gradient(batch_of(corrections=weights), config)
    expected, slopes, _ = transcribed(config, TRAIN, OLD, ADVANTAGES, rollout_logprobs=ROLLOUT)
    assert loss == pytest.approx(expected, rel=1e-6)  # the weights are from float32 differences
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-13)
    plain = LOSSES[name](config)(batch_of())
    assert torch.equal(terms.ratio, plain.ratio)
    assert sides(terms) == sides(plain)


@pytest.mark.parametrize("name", NAMES)
def test_off_policy_masking_drops_whole_responses(name: AlgorithmName) -> None:
    """Decided by the mean over the response: of three responses with A < 0 the first went bad at every token,
    the second at one token only, the third at one token but so badly that its mean says so; the fourth went
    bad with A > 0."""
    train = [torch.full((4,), -1.0) for _ in range(4)]
    gaps = [[0.3, 0.3, 0.3, 0.3], [0.3, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3]]
    rollout = [row + torch.tensor(gap) for row, gap in zip(train, gaps, strict=True)]
    batch = make_batch(train, train, [-1.0, -1.0, -1.0, 1.0], rollout_logprobs=rollout)
    config = settings(name, off_policy_mask={"threshold": 0.1})
    _, gradient, _ = loss_and_gradient(batch, config)
    _, plain, _ = loss_and_gradient(batch, settings(name))
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(4)
    assert torch.equal(gradient, plain * kept)
    assert bool((plain != 0).all())


def test_off_policy_masking_looks_at_the_policy_of_now() -> None:
    """Not at that before the updates: the same batch is kept at the start and dropped when the policy has
    moved away."""
    old = [torch.full((2,), -1.0)]
    config = settings("gspo", off_policy_mask={"threshold": 0.1})
    for moved, kept in ((0.0, True), (-0.5, False)):
        batch = make_batch([old[0] + moved], old, [-1.0], rollout_logprobs=old)
        _, gradient, _ = loss_and_gradient(batch, config)
        # at -0.5 the clipped branch would be taken as well, so look at the loss
        assert bool((objective_of(config)(batch).loss != 0).all()) == kept
        assert bool((gradient != 0).any()) == kept


def test_masking_leaves_the_weights_of_the_others_alone() -> None:
    """The mean is over all responses, the dropped ones included: the loss of a mini-batch does not jump with
    their number."""
    row = torch.full((2,), -1.0)
    batch = make_batch([row, row], [row, row], [1.0, -1.0], rollout_logprobs=[row, row + 1])
    loss, _, _ = loss_and_gradient(batch, settings("gspo", off_policy_mask={"threshold": 0.1}))
    assert loss == pytest.approx(-0.5)


def test_masked_responses_keep_their_kl() -> None:
    row = torch.full((2,), -1.0)
    batch = make_batch([row], [row], [-1.0], rollout_logprobs=[row + 1], ref_logprobs=[row + 0.5])
    config = settings("grpo", off_policy_mask={"threshold": 0.1}, kl={"coefficient": 2.0, "estimator": "k2"})
    loss, gradient, _ = loss_and_gradient(batch, config)
    assert loss == pytest.approx(2 * 0.125)
    assert gradient.tolist() == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize("name", NAMES)
def test_entropy_is_a_bonus_with_a_gradient(name: AlgorithmName) -> None:
    """d loss / d H_it = -coefficient x the token's weight, whatever the objective does with the token."""
    entropies = torch.rand(sum(LENGTHS), dtype=torch.float64).requires_grad_()
    batch = replace(batch_of(), entropies=entropies)
    config = settings(name, entropy_coefficient=0.01)
    (gradient,) = torch.autograd.grad(objective_of(config)(batch).loss.sum(), entropies)
    assert gradient.tolist() == [-0.01] * sum(LENGTHS)


@pytest.mark.parametrize("bad", ["rollout_logprobs", "ref_logprobs", "corrections"])
def test_nan_in_what_is_added_stays_visible(bad: str) -> None:
    """Off-policy masking included: a mean that is NaN is neither below nor above the threshold."""
    rows = {"rollout_logprobs": ROLLOUT, "ref_logprobs": REFERENCE, "corrections": [t * 0 + 1 for t in TRAIN]}
    rows[bad] = [row.clone() for row in rows[bad]]
    rows[bad][1][0] = math.nan
    keys = {"off_policy_mask": {"threshold": 0.0}, "kl": {"coefficient": 0.1}}
    loss, _, _ = loss_and_gradient(batch_of(**rows), settings("gspo", **keys))
    assert math.isnan(loss)
