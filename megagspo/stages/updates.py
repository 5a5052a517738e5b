"""One optimizer update, and what is said when it cannot be made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megagspo.algo.objective import Objective
from megagspo.errors import NumericsError
from megagspo.types import MiniBatch

if TYPE_CHECKING:
    from megagspo.policy.policy import Gradient, MegatronPolicy


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer update: what it learned from, the policy's log-probabilities for that just before it, and
    how it went."""

    batch: MiniBatch
    gradient: Gradient
    grad_norm: float
    learning_rate: float


def update(policy: MegatronPolicy, batch: MiniBatch, objective: Objective, *, temperature: float) -> Update:
    """One gradient and one optimizer step. Raises NumericsError naming the sample, before any weight moves,
    when the loss is not finite."""
    gradient = policy.forward_backward(batch, objective, temperature=temperature)
    if not math.isfinite(gradient.loss):
        raise _what_is_not_finite(batch, gradient, policy.updates + 1)
    grad_norm, learning_rate = policy.optimizer_step()
    if not math.isfinite(grad_norm):
        raise NumericsError(
            f"the gradient norm of update {policy.updates} is {grad_norm}: the weights in memory are "
            "spoiled, the last checkpoint stands"
        )
    return Update(batch=batch, gradient=gradient, grad_norm=grad_norm, learning_rate=learning_rate)


def _what_is_not_finite(batch: MiniBatch, gradient: Gradient, number: int) -> NumericsError:
    inputs = {
        "the policy's log-probabilities": gradient.logprobs.logprobs,
        "old_logprobs": batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "advantages": batch.advantages,
        "corrections": batch.corrections,
    }
    for name, values in inputs.items():
        for sequence, tensor in zip(batch.sequences, values or (), strict=False):
            if not torch.isfinite(tensor).all():
                return NumericsError(
                    f"sample {sequence.id}: {name} are not finite: update {number} was not made",
                    sample=sequence.id,
                )
    return NumericsError(
        f"the loss of update {number} is {gradient.loss}: it was not made, and the last checkpoint stands"
    )
