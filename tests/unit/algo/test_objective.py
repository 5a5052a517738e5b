"""What every objective shares: the clipped surrogate, and the tokens of some members of a mini-batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from megagspo.algo.objective import clipped_terms, token_batch
from megagspo.types import MiniBatch, TrainSequence
from tests.unit.algo.batches import settings, sides

CONFIG = settings("grpo", clip_low=0.2, clip_high=0.3)
CORNERS = {  # ratio, advantage -> the objective's slope by the ratio, side
    (1.5, 1.0): (0.0, 1),
    (1.5, -1.0): (-1.0, 0),
    (0.5, 1.0): (1.0, 0),
    (0.5, -1.0): (0.0, -1),
    (1.1, 1.0): (1.0, 0),
    (1.1, -1.0): (-1.0, 0),
    (1.5, 0.0): (0.0, 0),
}


@pytest.mark.parametrize(("ratio", "advantage"), CORNERS)
def test_the_gradient_stops_in_two_of_four_corners(ratio: float, advantage: float) -> None:
    """Above the range for A > 0, below it for A < 0: where the minimum takes the clipped branch. These tokens
    are the clipped ones; being outside the range alone makes none."""
    w = torch.tensor([ratio], requires_grad=True)
    terms = clipped_terms(w, torch.tensor([advantage]), CONFIG)
    (slope,) = torch.autograd.grad(terms.loss.sum(), w)
    expected, side = CORNERS[ratio, advantage]
    assert -slope.item() == expected
    assert sides(terms) == [side]
    kept = min(max(ratio, 0.8), 1.3)
    assert -terms.loss.item() == pytest.approx(min(ratio * advantage, kept * advantage))


@pytest.mark.parametrize("dual_clip", [1.1, 1.3, 2.0])
def test_dual_clip_never_touches_positive_advantages(dual_clip: float) -> None:
    ratios = torch.linspace(0.1, 4.0, 40)
    bounded = settings("grpo", clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    free, with_bound = (clipped_terms(ratios, torch.ones(40), c) for c in (CONFIG, bounded))
    assert torch.equal(free.loss, with_bound.loss)
    assert sides(free) == sides(with_bound)


@pytest.mark.parametrize("dual_clip", [1.1, 1.3, 2.0])
def test_tokens_counted_as_clipped_have_no_gradient_and_lie_outside_the_range(dual_clip: float) -> None:
    ratios = torch.linspace(0.1, 4.0, 40).requires_grad_()
    config = settings("grpo", clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    for advantage in (1.0, -1.0):
        terms = clipped_terms(ratios, torch.full((40,), advantage), config)
        (slope,) = torch.autograd.grad(terms.loss.sum(), ratios)
        outside = (ratios < 0.8) | (ratios > 1.3)
        assert (terms.clipped_low | terms.clipped_high).tolist() == ((slope == 0) & outside).tolist()


def sequences(lengths: list[int]) -> list[TrainSequence]:
    return [
        TrainSequence(id=f"s{i}", token_ids=(1,) * (2 + length), prompt_length=2)
        for i, length in enumerate(lengths)
    ]


LENGTHS = [2, 3, 1]
ROWS = [10.0 * i + torch.arange(length) for i, length in enumerate(LENGTHS)]
MINI_BATCH = MiniBatch(
    sequences=sequences(LENGTHS),
    token_weights=[0.1, 0.2, 0.3],
    advantages=ROWS,
    old_logprobs=[-row for row in ROWS],
    ref_logprobs=[row + 0.5 for row in ROWS],
)


@pytest.mark.parametrize("members", [*itertools.permutations(range(3), 2), (), (1,), (0, 1, 2)])
def test_members_tokens_are_laid_end_to_end_in_their_order(members: tuple[int, ...]) -> None:
    count = sum(LENGTHS[i] for i in members)
    train, entropies = torch.zeros(count), torch.ones(count)
    batch = token_batch(MINI_BATCH, members, train, entropies)
    expected = [value for i in members for value in ROWS[i].tolist()]
    assert batch.advantages.tolist() == expected
    assert batch.old_logprobs.tolist() == [-value for value in expected]
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [value + 0.5 for value in expected]
    assert batch.segments.lengths.tolist() == [LENGTHS[i] for i in members]
    assert batch.rollout_logprobs is batch.corrections is None
