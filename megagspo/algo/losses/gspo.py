"""GSPO: group sequence policy optimisation (arXiv 2507.18071, eq. 5 to 7)."""

from __future__ import annotations

from megagspo.algo.objective import Objective, Terms, TokenBatch, clipped_terms
from megagspo.config.algorithm import AlgorithmConfig


def gspo(config: AlgorithmConfig) -> Objective:
    """s_i = exp(1/|y_i| sum_t (log pi_theta(y_it) - log pi_old(y_it))); minus min(s_i A_i, clip(s_i) A_i) at
    every token.

    With sequence-mean weights 1 / (N |y_i|) the sum over tokens is the paper's mean over responses, and every
    token of a response carries the same gradient weight s_i A_i / |y_i| (eq. 10). The mean log-ratio is
    clamped to +-log_ratio_max before exp; NaN passes through.
    """

    def terms(batch: TokenBatch) -> Terms:
        mean_log_ratio = batch.segments.mean(batch.train_logprobs - batch.old_logprobs)  # [N]
        ratio = mean_log_ratio.clamp(-config.log_ratio_max, config.log_ratio_max).exp()
        return clipped_terms(batch.segments.spread(ratio), batch.advantages, config)

    return terms
