"""Log-probabilities of chosen tokens from logits whose vocabulary is cut over tensor-parallel ranks.

Shapes: R tokens, V columns of this rank's part of the padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """This rank's columns of the vocabulary: [start, start + real) are tokens, the rest is padding that never
    counts."""

    start: int
    real: int
    group: dist.ProcessGroup


def vocabulary_part(*, columns: int, vocab_size: int, rank: int, group: dist.ProcessGroup) -> VocabularyPart:
    """columns: the width of this rank's logits; vocab_size: tokens of the whole vocabulary, without
    padding."""
    start = rank * columns
    return VocabularyPart(start=start, real=max(0, min(columns, vocab_size - start)), group=group)


def token_logprobs(
    logits: Tensor, targets: Tensor, part: VocabularyPart, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, in nats.

    logits [R, V] any float dtype, targets [R] int64 (model-wide ids) -> [R] float32 with gradient, [R]
    float32 without. At temperature 1 the logits are not divided at all.
    """
    return _TokenLogprobs.apply(logits, targets, part, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """One pass forward; backward is (one-hot - softmax) * gradient from the saved log-sum-exp, no second
    communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, part: VocabularyPart, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled = _scale(logits[:, : part.real], temperature)  # [R, real]
        local_max = (
            scaled.max(dim=1).values if part.real else logits.new_full((len(logits),), -torch.inf).float()
        )
        maximum = _reduce(local_max, part, dist.ReduceOp.MAX)
        weights = (scaled - maximum[:, None]).exp()  # [R, real]
        total = _reduce(weights.sum(dim=1), part, dist.ReduceOp.SUM)
        log_total = total.log()
        normaliser = maximum + log_total  # [R]
        local = targets - part.start
        here = (local >= 0) & (local < part.real)
        picked = (
            scaled.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
            if part.real
            else torch.zeros_like(total)
        )
        chosen = _reduce(torch.where(here, picked, 0.0), part, dist.ReduceOp.SUM)
        mean_logit = _reduce((weights * scaled).sum(dim=1), part, dist.ReduceOp.SUM) / total
        entropy = normaliser - mean_logit
        ctx.save_for_backward(logits, normaliser, local, here)
        ctx.part, ctx.temperature = part, temperature
        ctx.mark_non_differentiable(entropy)
        return (chosen - maximum) - log_total, entropy  # the small number last: large logits lose nothing

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normaliser, local, here = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        scaled = _scale(logits[:, : part.real], ctx.temperature)
        slope = gradients[0] / ctx.temperature  # [R]
        real = (scaled - normaliser[:, None]).exp_() * -slope[:, None]  # [R, real]
        rows = torch.nonzero(here).flatten()
        real[rows, local[rows]] += slope[
            rows
        ]  # before rounding to the logits' dtype: slope * (1 - p) is a small difference
        grad = torch.zeros_like(logits)
        grad[:, : part.real] = real
        return grad, None, None, None


def _scale(logits: Tensor, temperature: float) -> Tensor:
    full = logits.float()
    return full if temperature == 1.0 else full / temperature


def _reduce(x: Tensor, part: VocabularyPart, operation: Any) -> Tensor:
    if part.group.size() > 1:
        dist.all_reduce(x, op=operation, group=part.group)
    return x
