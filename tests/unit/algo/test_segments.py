"""Sums and means of the responses in a packed row."""

from __future__ import annotations

import math

import pytest
import torch

from megagspo.algo.segments import Segments

LENGTHS = [2, 8, 1, 5]


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


def test_means_and_spread_are_those_of_each_response() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(LENGTHS), generator=generator)
    segments = Segments.of(LENGTHS)
    expected = [part.double().mean().item() for part in values.split(LENGTHS)]
    # float32 sums of at most 8 numbers
    assert segments.mean(values).tolist() == pytest.approx(expected, abs=1e-6)
    spread = segments.spread(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert spread.tolist() == [1.0] * 2 + [2.0] * 8 + [3.0] + [4.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_type_of_numbers_is_kept(dtype: torch.dtype) -> None:
    assert Segments.of([2, 1]).mean(torch.ones(3, dtype=dtype)).dtype == dtype


def test_nan_stays_in_its_own_response() -> None:
    means = Segments.of([2, 2]).mean(torch.tensor([math.nan, 1.0, 1.0, 3.0]))
    assert means.isnan().tolist() == [True, False]
    assert means[1] == 2
