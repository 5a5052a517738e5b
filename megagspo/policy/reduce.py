"""Results that every rank has to know, from the ranks that computed them.

Of the ranks that hold the same value exactly one contributes; all others add zero, so a sum over the whole
world is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_responses(
    own: Sequence[tuple[list[int], Tensor]], lengths: Sequence[int], *, contributes: bool
) -> list[Tensor]:
    """Per-token results of every sequence, on every rank.

    own: (positions of sequences, their tokens' values laid end to end) for each micro-batch of this rank;
    lengths: loss tokens of every sequence. Returns one float32 tensor [length] a sequence, on the CPU.
    NaN travels.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    device = own[0][1].device if own else torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    flat = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    for members, values in own if contributes else ():
        for member, piece in zip(members, values.split([lengths[i] for i in members]), strict=True):
            flat[starts[member] : starts[member + 1]] = piece
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
