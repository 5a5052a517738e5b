"""How much each token counts. Weights are made once, over a whole optimizer mini-batch and all ranks, before
it is cut.

The loss is sum over tokens of weight x term. Since every normalisation is inside the weights, loss and
gradient do not depend on how the mini-batch is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def sequence_mean(lengths: Sequence[int]) -> list[float]:
    """Mean over each response's tokens, then over responses: 1 / (N |y_i|)."""
    return [1.0 / (len(lengths) * length) for length in lengths]


def token_mean(lengths: Sequence[int]) -> list[float]:
    """All tokens alike: 1 / sum_i |y_i|."""
    return [1.0 / sum(lengths)] * len(lengths)


AGGREGATIONS: dict[str, Callable[[Sequence[int]], list[float]]] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
}
"""From the response lengths of a mini-batch to the weight of each response's tokens, by configuration
name."""
