"""Log-probabilities and entropies of chosen tokens straight from hidden states; the vocabulary is cut over
tensor-parallel ranks, and the full [R, V] matrix of logits never exists.

Shapes: R tokens, D hidden, V rows of this rank's part of the padded vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Memory for the float32 logits of a chunk of tokens. A chunk of any size gives the same result; this one is
small beside the weights and large enough for matrix products at full speed (tools/bench/logprob.py)."""


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """This rank's rows of the output matrix: [start, start + real) are tokens, the rest is padding that never
    counts."""

    start: int
    real: int
    group: dist.ProcessGroup


def vocabulary_part(*, rows: int, vocab_size: int, rank: int, group: dist.ProcessGroup) -> VocabularyPart:
    """rows: of this rank's part of the padded output matrix; vocab_size: tokens of the whole vocabulary,
    without padding."""
    start = rank * rows
    return VocabularyPart(start=start, real=max(0, min(rows, vocab_size - start)), group=group)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    part: VocabularyPart,
    *,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that distribution, in nats.

    hidden [R, D], weight [V, D] any float dtype, targets [R] int64 (model-wide ids) -> two [R] float32 with
    gradient. The products are made in the dtype of hidden, everything after them in float32. Of the gradient
    with respect to hidden each rank has the part that comes from its rows: the caller's
    tensor-parallel region adds them up. At temperature 1 the logits are not divided at all.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, part, temperature, chunk_bytes)


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps two numbers a token, log-sum-exp and entropy; backward makes a chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        part: VocabularyPart,
        temperature: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        local = targets - part.start
        here = (local >= 0) & (local < part.real)  # [R]
        local = torch.where(here, local, 0)
        count = len(targets)
        maximum = hidden.new_full((count,), -torch.inf, dtype=torch.float32)
        # With s the logits of this rank's rows less their maximum: sum exp(s), sum exp(s) s, s at the target.
        sums = hidden.new_zeros((3, count), dtype=torch.float32)
        for rows, logits in _chunks(hidden, weight, part, temperature, chunk_bytes):
            maximum[rows] = logits.max(dim=1).values
            logits -= maximum[rows, None]
            sums[2, rows] = logits.gather(1, local[rows, None])[:, 0]
            weights = logits.exp()
            sums[0, rows] = weights.sum(dim=1)
            sums[1, rows] = _row_products(weights, logits)
        highest = _all_reduce(maximum.clone(), part, dist.ReduceOp.MAX)
        total, moment, chosen = _rebased(sums, maximum - highest, here, part)
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, local, here, highest + log_total, entropy)
        ctx.part, ctx.temperature, ctx.chunk_bytes = part, temperature, chunk_bytes
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy  # both small: large logits lose nothing

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """With s the logits over temperature, p = softmax(s), H the entropy: d logprob / ds = onehot - p,
        dH / ds = -p (log p + H)."""
        hidden, weight, local, here, normaliser, entropy = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        of_logprob, of_entropy = gradients
        if of_logprob is None:
            of_logprob = torch.zeros_like(entropy)
        grad_hidden = torch.zeros_like(hidden)  # what it stays on a rank whose rows are all padding
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows, logits in _chunks(hidden, weight, part, ctx.temperature, ctx.chunk_bytes):
            logits -= normaliser[rows, None]  # log p, [C, real]
            if of_entropy is None:
                slope = logits.exp_().mul_(-of_logprob[rows, None])
            else:
                factor = (
                    (logits + entropy[rows, None]).mul_(of_entropy[rows, None]).add_(of_logprob[rows, None])
                )
                slope = logits.exp_().mul_(factor).neg_()
            own = torch.nonzero(here[rows]).flatten()
            slope[own, local[rows][own]] += of_logprob[rows][own]
            if ctx.temperature != 1.0:
                slope /= ctx.temperature
            slope = slope.to(hidden.dtype)
            torch.mm(slope, weight[: part.real], out=grad_hidden[rows])
            _add_product(grad_weight[: part.real], slope, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, part: VocabularyPart, temperature: float, chunk_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """The tokens of each chunk and their float32 logits over temperature [C, real], which the caller may
    overwrite: all chunks share one buffer."""
    real = weight[: part.real]
    size = max(1, chunk_bytes // max(1, 4 * part.real))
    buffer = hidden.new_empty((min(size, len(hidden)), part.real))
    for start in range(0, len(hidden) if part.real else 0, size):
        rows = slice(start, min(start + size, len(hidden)))
        logits = torch.mm(hidden[rows], real.t(), out=buffer[: rows.stop - start]).float()
        yield rows, logits if temperature == 1.0 else logits.div_(temperature)


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """sum_v a[c, v] b[c, v] in one pass over memory, [C]."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total [real, D] float32 += slope^T hidden."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), hidden)
    else:
        total += slope.t() @ hidden


def _rebased(sums: Tensor, shift: Tensor, here: Tensor, part: VocabularyPart) -> Tensor:
    """The sums of all ranks' rows over exp(s), exp(s) s and s at the target, [3, R], with s above the highest
    logit of all ranks; shift = this rank's maximum - that."""
    if part.group.size() == 1:
        return sums
    if not part.real:  # a rank whose rows are all padding
        shift = torch.zeros_like(shift)
    scale = shift.exp()
    ours = torch.stack(
        [
            sums[0] * scale,
            (sums[1] + sums[0] * shift) * scale,
            torch.where(here, sums[2] + shift, 0.0),
        ]
    )
    return _all_reduce(ours, part, dist.ReduceOp.SUM)


def _all_reduce(x: Tensor, part: VocabularyPart, operation: Any) -> Tensor:
    if part.group.size() > 1:
        dist.all_reduce(x, op=operation, group=part.group)
    return x
