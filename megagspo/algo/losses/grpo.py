"""GRPO: group relative policy optimisation (arXiv 2402.03300, eq. 3, without the KL term)."""

from __future__ import annotations

from megagspo.algo.objective import Objective, Terms, TokenBatch, clipped_terms


def grpo(*, clip_low: float, clip_high: float, log_ratio_max: float) -> Objective:
    """w_it = pi_theta(y_it) / pi_old(y_it); minus min(w_it A_it, clip(w_it) A_it) at every token.

    The log-ratio is clamped to +-log_ratio_max before exp; NaN passes through.
    """

    def terms(batch: TokenBatch) -> Terms:
        log_ratio = batch.train_logprobs - batch.old_logprobs  # [R]
        ratio = log_ratio.clamp(-log_ratio_max, log_ratio_max).exp()
        return clipped_terms(ratio, batch.advantages, clip_low=clip_low, clip_high=clip_high)

    return terms
