"""Trainer-rollout correction: a weight for what the engine's probabilities differ from the trainer's."""

from __future__ import annotations

import torch
from torch import Tensor

from megagspo.config.algorithm import CorrectionConfig


def correction_weights(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, config: CorrectionConfig, *, log_ratio_max: float
) -> Tensor:
    """The weights c [response tokens] of one response, before any update; no gradient.

    c = exp(log pi_old of the trainer - log pi of the engine): of each token, or one of the response, by the
    mean of its log-ratios (geometric_mean) or their sum (product). truncate: min(c, high), TIS; mask: c where
    low <= c <= high, else 0, MIS or IcePop. The log-ratio is clamped to +-log_ratio_max before exp; NaN
    passes through.
    """
    log_ratio = (trainer_logprobs - rollout_logprobs).detach()
    if config.level == "sequence":
        whole = log_ratio.mean() if config.sequence_form == "geometric_mean" else log_ratio.sum()
        log_ratio = whole.expand_as(log_ratio)
    weight = log_ratio.clamp(-log_ratio_max, log_ratio_max).exp()
    if config.mode == "truncate":
        return weight.clamp(max=config.high)
    outside = (weight < config.low) | (weight > config.high)  # False for NaN, which stays
    return torch.where(outside, torch.zeros_like(weight), weight)
