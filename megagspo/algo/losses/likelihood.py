"""Supervised warm-up: the negative log-likelihood of the response."""

from __future__ import annotations

import torch

from megagspo.algo.objective import Terms, TokenBatch


def likelihood(batch: TokenBatch) -> Terms:
    """-log pi_theta(y_t) at every token; there is no old policy, so the ratio is 1 and nothing is ever
    clipped."""
    none = torch.zeros_like(batch.train_logprobs, dtype=torch.bool)
    ones = torch.ones_like(batch.train_logprobs)
    return Terms(loss=-batch.train_logprobs, ratio=ones, clipped_low=none, clipped_high=none)
