"""CISPO: clipped importance-sampling weights on the log-likelihood (arXiv 2506.13585, eq. 4 and 5)."""

from __future__ import annotations

import torch

from megagspo.algo.objective import Objective, Terms, TokenBatch
from megagspo.config.algorithm import AlgorithmConfig


def cispo(config: AlgorithmConfig) -> Objective:
    """w_it = pi_theta(y_it) / pi_old(y_it); minus sg[min(w_it, 1 + clip_high)] A_it log pi_theta(y_it) at
    every token.

    The gradient flows through the log-likelihood only, so no token is without one: a token counts as clipped
    where its weight was cut. The log-ratio is clamped to +-log_ratio_max before exp; NaN passes through.
    """

    def terms(batch: TokenBatch) -> Terms:
        log_ratio = (batch.train_logprobs - batch.old_logprobs).detach()  # [R]
        ratio = log_ratio.clamp(-config.log_ratio_max, config.log_ratio_max).exp()
        weight = ratio.clamp(max=1 + config.clip_high)
        return Terms(
            loss=-weight * batch.advantages * batch.train_logprobs,
            ratio=ratio,
            clipped_low=torch.zeros_like(ratio, dtype=torch.bool),
            clipped_high=ratio > 1 + config.clip_high,
        )

    return terms
