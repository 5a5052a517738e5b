"""How much each token counts. Weights are made once, over a whole optimizer mini-batch and all ranks, before
it is cut.

The loss is sum over tokens of weight x term. Since every normalisation is inside the weights, loss and
gradient do not depend on how the mini-batch is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megagspo.config.algorithm import Aggregation


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, *, length_constant: int | None = None
) -> list[float]:
    """The weight of each token of each of N responses, by their numbers of trainable tokens |y_i|.

    sequence_mean: mean over each response's tokens, then over responses, 1 / (N |y_i|); token_mean: all
    tokens alike, 1 / sum_i |y_i|; constant_length: sum over each response's tokens / length_constant, then
    mean over responses, 1 / (N length_constant) (arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        return [1.0 / sum(lengths)] * len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (len(lengths) * length) for length in lengths]
    assert length_constant is not None, "the configuration gives one"
    return [1.0 / (len(lengths) * length_constant)] * len(lengths)
