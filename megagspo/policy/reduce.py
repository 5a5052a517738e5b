"""Results that every rank has to know, from the ranks that computed them.

Of the ranks that hold the same value exactly one contributes; all others add zero, so a sum over the whole
world is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def total_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor] | None:
    """The differentiable sum over the ranks of a group, each of which goes on with it to a part of the loss;
    None for a group of one. Every rank calls it, and its gradient, alike."""
    return partial(_Total.apply, group) if group.size() > 1 else None


class _Total(torch.autograd.Function):
    """y = sum over ranks of x. The loss is the sum of the ranks' losses, each a function of y: its gradient
    with respect to any rank's x is the sum of theirs with respect to y."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _summed(gradients[0], ctx.group)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gather_responses(
    own: Sequence[tuple[list[int], Tensor, Tensor]], lengths: Sequence[int], *, contributes: bool
) -> list[Tensor]:
    """Per-token results of every sequence, on every rank.

    own: for each micro-batch of this rank the positions of its sequences, which of their loss tokens laid end
    to end it holds, [R], and the values at those, [R]; lengths: loss tokens of every sequence. Returns one
    float32 tensor [length] a sequence, on the CPU. NaN travels.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    device = own[0][2].device if own else torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    flat = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    for members, tokens, values in own if contributes else ():
        if members:
            places = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in members])
            flat[places[tokens]] = values
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)
    return list(flat.cpu().split(list(lengths)))


def sum_over_ranks(values: Sequence[Tensor], *, contributes: bool, device: torch.device) -> float:
    """The sum of all micro-batches' scalars of all ranks, in float64. NaN travels."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value in values if contributes else ():
        total += value.double()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item()
