"""What is added to every objective alike: correction, off-policy masking, KL in the loss, entropy bonus."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megagspo.algo.kl import kl_estimate
from megagspo.algo.objective import Objective, Terms, TokenBatch
from megagspo.config.algorithm import AlgorithmConfig


def with_all_terms(surrogate: Objective, config: AlgorithmConfig) -> Objective:
    """loss_it = c_it m_i surrogate_it + coefficient_kl KL_it - coefficient_entropy H_it.

    c: the correction weights of the batch (`corrections.py`); m: 0 for responses that went bad off-policy;
    KL and entropy are the policy's own and are neither corrected, masked nor multiplied by a ratio.
    """

    def terms(batch: TokenBatch) -> Terms:
        given = surrogate(batch)
        loss = given.loss
        if batch.corrections is not None:
            loss = loss * batch.corrections
        if config.off_policy_mask.threshold is not None:
            loss = loss * _on_policy_enough(batch, config.off_policy_mask.threshold)
        if config.kl.coefficient > 0 and config.kl.where == "loss":
            assert batch.ref_logprobs is not None, "the learner gives them where the configuration needs them"
            estimate = kl_estimate(
                batch.train_logprobs,
                batch.ref_logprobs,
                estimator=config.kl.estimator,
                log_ratio_max=config.log_ratio_max,
            )
            loss = loss + config.kl.coefficient * estimate
        if config.entropy_coefficient > 0:
            assert batch.entropies is not None
            loss = loss - config.entropy_coefficient * batch.entropies
        return replace(given, loss=loss)

    return terms


def _on_policy_enough(batch: TokenBatch, threshold: float) -> Tensor:
    """[R]: 0 at the tokens of a response with a negative advantage whose mean log pi_rollout - log pi_theta
    is above the threshold, decided once for the whole response (DeepSeek-V3.2 report); 1 elsewhere. NaN in
    that mean stays NaN."""
    assert batch.rollout_logprobs is not None
    gap = batch.segments.mean(batch.rollout_logprobs - batch.train_logprobs.detach())  # [N]
    dropped = (gap > threshold) & (batch.segments.mean(batch.advantages) < 0)
    return batch.segments.spread(torch.where(gap.isnan(), gap, (~dropped).to(gap.dtype)))
