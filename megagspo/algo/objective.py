"""What every objective takes and gives. One objective is one file of `algo/losses/`.

Shapes: R response tokens of a micro-batch, laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.algo.segments import Segments
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.types import MiniBatch


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The response tokens of one micro-batch. All tensors are [R] float32, log-probabilities in nats; only
    train_logprobs and entropies carry a gradient.

    train_logprobs: log pi_theta; old_logprobs: those of the policy that the ratio is taken against;
    advantages: A_it, for a sequence-level objective equal over the tokens of a response. Where the
    configuration asks for them: rollout_logprobs, the engine's own; ref_logprobs, the reference policy's;
    entropies of pi_theta where each token was drawn; corrections, the weights of `corrections.py`.
    """

    train_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    segments: Segments
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    corrections: Tensor | None = None


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


def token_batch(
    batch: MiniBatch,
    members: Sequence[int],
    train_logprobs: Tensor,
    entropies: Tensor,
    *,
    tokens: Tensor | None = None,
    segments: Segments | None = None,
) -> TokenBatch:
    """The loss tokens of some sequences of a mini-batch, laid end to end, with the policy's values for them
    ([R] each), on their device.

    tokens [R], segments: which of those loss tokens the values are of, where it is not all (context
    parallelism).
    """
    if segments is None:
        lengths = [batch.sequences[i].loss_tokens for i in members]
        segments = Segments.of(lengths, device=train_logprobs.device)

    def joined(values: Sequence[Tensor] | None) -> Tensor | None:
        if values is None:
            return None
        whole = _cat([values[i] for i in members], like=train_logprobs)
        return whole if tokens is None else whole[tokens]

    old_logprobs, advantages = joined(batch.old_logprobs), joined(batch.advantages)
    assert old_logprobs is not None
    assert advantages is not None
    return TokenBatch(
        train_logprobs=train_logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        segments=segments,
        rollout_logprobs=joined(batch.rollout_logprobs),
        ref_logprobs=joined(batch.ref_logprobs),
        entropies=entropies,
        corrections=joined(batch.corrections),
    )


def _cat(values: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat(list(values)).to(like) if values else like.new_zeros(0)


def clipped_terms(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Terms:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), the pessimistic surrogate of PPO (arXiv 1707.06347,
    eq. 7); with dual_clip c and A < 0 the objective is kept at or above c A (arXiv 1912.09729, eq. 5).

    ratio [R] with gradient, advantages [R] -> Terms. The minimum takes the clipped branch above the range for
    A > 0 and below it for A < 0; in the other two corners the gradient flows, up to dual clip's bound.
    """
    low, high = 1 - (config.clip_low or 1.0), 1 + config.clip_high
    objective = (ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    w = ratio.detach()
    clipped_high = (w > high) & (advantages > 0)
    if config.dual_clip is not None:
        bounded = objective.maximum(config.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
        clipped_high = clipped_high | ((w > max(high, config.dual_clip)) & (advantages < 0))
    return Terms(
        loss=-objective,
        ratio=w,
        clipped_low=(w < low) & (advantages < 0),
        clipped_high=clipped_high,
    )
