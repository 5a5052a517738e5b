"""What every objective takes and gives. One objective is one file of `algo/losses/`.

Shapes: R response tokens of a micro-batch, laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megagspo.algo.segments import Segments


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The response tokens of one micro-batch. All tensors are [R] float32; only train_logprobs carries a
    gradient.

    train_logprobs: log pi_theta, nats; old_logprobs: log-probabilities of the policy that the ratio is taken
    against; advantages: A_it, for a sequence-level objective equal over the tokens of a response.
    """

    train_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    segments: Segments


@dataclass(frozen=True, kw_only=True)
class Terms:
    """loss [R]: what is minimised, before weighting (the learner adds up weight x loss); ratio [R]: the
    importance ratio, no gradient; clipped_low, clipped_high [R] bool: tokens whose ratio lies outside the
    range on that side AND whose gradient through the ratio is therefore zero."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


Objective = Callable[[TokenBatch], Terms]


def clipped_terms(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Terms:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), the pessimistic surrogate of PPO (arXiv 1707.06347,
    eq. 7).

    ratio [R] with gradient, advantages [R] -> Terms. The minimum takes the clipped branch above the range for
    A > 0 and below it for A < 0; in the other two corners the gradient flows.
    """
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = (ratio * advantages).minimum(kept * advantages)
    w = ratio.detach()
    return Terms(
        loss=-objective,
        ratio=w,
        clipped_low=(w < 1 - clip_low) & (advantages < 0),
        clipped_high=(w > 1 + clip_high) & (advantages > 0),
    )
