"""Results that every rank has to know, from the ranks that computed them.

Of the ranks that hold the same value exactly one contributes; all others add zero, so a sum over the whole
world is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SUMS = ("loss", "tokens", "entropy", "ratio", "clipped_low", "clipped_high")
MAXIMA = ("ratio_max",)


def gather_responses(
    own: Sequence[tuple[list[int], Tensor]], lengths: Sequence[int], *, contributes: bool
) -> list[Tensor]:
    """Per-token results of every sequence, on every rank.

    own: (positions of sequences, their tokens' values laid end to end) for each micro-batch of this rank;
    lengths: response tokens of every sequence. Returns one float32 tensor [length] a sequence, on the CPU.
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


def sum_over_ranks(
    reports: Sequence[dict[str, Tensor]], *, contributes: bool, device: torch.device
) -> dict[str, float]:
    """Adds up the reports of all micro-batches of all ranks; takes the maximum of what is a maximum."""
    filled = [report for report in reports if report] if contributes else []
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
    for report in filled:
        sums += torch.stack([report[name] for name in SUMS])
        maxima = torch.maximum(maxima, torch.stack([report[name] for name in MAXIMA]))
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
        not_a_number = maxima.isnan().double()  # gloo's maximum may lose a NaN; this sum does not
        dist.all_reduce(not_a_number)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        maxima = torch.where(not_a_number > 0, torch.nan, maxima)
    return dict(zip((*SUMS, *MAXIMA), [*sums.tolist(), *maxima.tolist()], strict=True))
