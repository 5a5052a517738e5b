"""Estimates of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from torch import Tensor

from megagspo.config.algorithm import Estimator

ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: Estimator,
    log_ratio_max: float,
) -> Tensor:
    """With x = ref_logprobs - logprobs at each token: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, nats.

    k1 and k3 are unbiased on samples of the policy, k3 is never negative. For k3, x is clamped to
    +-log_ratio_max BEFORE exp: clamped after it, the value would be finite and the gradient NaN. NaN in an
    input stays NaN.
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    x = x.clamp(-log_ratio_max, log_ratio_max)
    return x.expm1() - x
