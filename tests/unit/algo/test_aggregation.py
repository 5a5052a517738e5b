"""Token weights: made once for a mini-batch, the same for every way of cutting it."""

from __future__ import annotations

import pytest

from megagspo.algo.aggregation import token_weights
from megagspo.config.algorithm import Aggregation

LENGTHS = [2, 8, 1, 5]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_weights_of_all_tokens_add_up_to_one(aggregation: Aggregation) -> None:
    weights = token_weights(LENGTHS, aggregation)
    assert sum(weight * length for weight, length in zip(weights, LENGTHS, strict=True)) == pytest.approx(1)


def test_token_mean_does_not_depend_on_the_split() -> None:
    """A11: 2 tokens at loss 1 and 8 tokens at loss 0, in one micro-batch or two."""
    weights = token_weights([2, 8], "token_mean")
    one_micro_batch = sum([weights[0] * 1.0] * 2 + [weights[1] * 0.0] * 8)
    two_micro_batches = sum([weights[0] * 1.0] * 2) + sum([weights[1] * 0.0] * 8)
    assert one_micro_batch == two_micro_batches == pytest.approx(0.2)


def test_sequence_mean_weighs_responses_alike() -> None:
    weights = token_weights(LENGTHS, "sequence_mean")
    totals = [weight * length for weight, length in zip(weights, LENGTHS, strict=True)]
    assert totals == pytest.approx([0.25] * 4)


def test_constant_length_weighs_tokens_alike_whatever_the_lengths_of_the_batch() -> None:
    """arXiv 2503.20783: sum over tokens / constant, mean over responses. A token's weight changes neither
    with its own response's length nor with another's."""
    assert token_weights(LENGTHS, "constant_length", length_constant=16) == [1 / 64] * 4
    assert token_weights([9, 9, 9, 900], "constant_length", length_constant=16) == [1 / 64] * 4
