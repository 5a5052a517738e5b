"""GRPO: group relative policy optimisation (arXiv 2402.03300, eq. 3); its surrogate is PPO's, one ratio a
token."""

from __future__ import annotations

from megagspo.algo.objective import Objective, Terms, TokenBatch, clipped_terms
from megagspo.config.algorithm import AlgorithmConfig


def grpo(config: AlgorithmConfig) -> Objective:
    """w_it = pi_theta(y_it) / pi_old(y_it); minus min(w_it A_it, clip(w_it) A_it) at every token.

    The log-ratio is clamped to +-log_ratio_max before exp; NaN passes through. Objectives that differ from
    GRPO in aggregation, advantage or clip range alone share this term: see `dr_grpo`, `dapo`, `rloo`,
    `reinforce_pp` in DEFAULTS.
    """

    def terms(batch: TokenBatch) -> Terms:
        log_ratio = batch.train_logprobs - batch.old_logprobs  # [R]
        ratio = log_ratio.clamp(-config.log_ratio_max, config.log_ratio_max).exp()
        return clipped_terms(ratio, batch.advantages, config)

    return terms
