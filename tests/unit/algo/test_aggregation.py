"""Token weights: made once for a mini-batch, the same for every way of cutting it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from megagspo.algo.aggregation import AGGREGATIONS, sequence_mean, token_mean
from megagspo.algo.segments import Segments

LENGTHS = [2, 8, 1, 5]


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS)
def test_weights_of_all_tokens_add_up_to_one(aggregation: Callable[[Sequence[int]], list[float]]) -> None:
    weights = aggregation(LENGTHS)
    assert sum(weight * length for weight, length in zip(weights, LENGTHS, strict=True)) == pytest.approx(1)


def test_token_mean_does_not_depend_on_the_split() -> None:
    """A11: 2 tokens at loss 1 and 8 tokens at loss 0, in one micro-batch or two."""
    weights = token_mean([2, 8])
    one_micro_batch = sum([weights[0] * 1.0] * 2 + [weights[1] * 0.0] * 8)
    two_micro_batches = sum([weights[0] * 1.0] * 2) + sum([weights[1] * 0.0] * 8)
    assert one_micro_batch == two_micro_batches == pytest.approx(0.2)


def test_sequence_mean_weighs_responses_alike() -> None:
    totals = [weight * length for weight, length in zip(sequence_mean(LENGTHS), LENGTHS, strict=True)]
    assert totals == pytest.approx([0.25] * 4)


def test_response_without_tokens_has_mean_zero_and_passes_no_gradient() -> None:
    """A10: a micro-batch without a loss-bearing token adds 0, not NaN."""
    segments = Segments.of([2, 0, 3])
    values = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0], requires_grad=True)
    means = segments.mean(values)
    assert means.tolist() == [2, 0, 4]
    means[1].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0] * 5


def test_no_responses_at_all() -> None:
    segments = Segments.of([])
    assert segments.mean(torch.empty(0)).tolist() == []
    assert segments.spread(torch.empty(0)).tolist() == []


def test_segment_means_and_spread_are_those_of_each_response() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(LENGTHS), generator=generator)
    segments = Segments.of(LENGTHS)
    expected = [part.double().mean().item() for part in values.split(LENGTHS)]
    assert segments.mean(values).tolist() == pytest.approx(
        expected, abs=1e-6
    )  # float32 sums of at most 8 numbers
    spread = segments.spread(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert spread.tolist() == [1.0] * 2 + [2.0] * 8 + [3.0] + [4.0] * 5
