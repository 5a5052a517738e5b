"""A blend of sequence and token importance ratios, from GRPO (a = 0) to GSPO-token (a = 1)."""

from __future__ import annotations

from torch import Tensor

from megagspo.algo.objective import Objective, Terms, TokenBatch, clipped_terms
from megagspo.config.algorithm import AlgorithmConfig


def hybrid(config: AlgorithmConfig) -> Objective:
    """`blended` with a = algorithm.hybrid_weight; the default clip range is too, see `between_ranges`."""
    return blended(config, weight=config.hybrid_weight)


def blended(config: AlgorithmConfig, *, weight: float) -> Objective:
    """w_it = exp(a (sg[mean_t d_it] + l_it - sg[l_it]) + (1 - a) d_it), d_it = l_it - log pi_old(y_it); minus
    min(w_it A_it, clip(w_it) A_it) at every token.

    The exponent is clamped to +-log_ratio_max; NaN passes through. The gradient of every token's exponent
    with respect to its own l_it is 1 for every a.
    """

    def terms(batch: TokenBatch) -> Terms:
        new = batch.train_logprobs
        difference = (new - batch.old_logprobs).detach()  # d, [R]
        mean = batch.segments.spread(batch.segments.mean(difference))
        # l - sg[l] is exactly 0 and comes first: l + mean - sg[l] would round effects of 3e-4 away in low
        # precision. Its slope is 1, as that of a (l - sg[l]) + (1 - a) d.
        exponent = (new - new.detach()) + _between(mean, difference, weight)
        ratio = exponent.clamp(-config.log_ratio_max, config.log_ratio_max).exp()
        return clipped_terms(ratio, batch.advantages, config)

    return terms


def _between(sequence: Tensor, token: Tensor, weight: float) -> Tensor:
    """a sequence + (1 - a) token; an end is taken as it is, for 0 times an infinite log-ratio is NaN."""
    if weight in (0.0, 1.0):
        return sequence if weight else token
    return weight * sequence + (1 - weight) * token
