"""How context-parallel ranks share the tokens of a packed row.

Each sequence is filled up to a multiple of 2 x C tokens for C ranks and cut into 2 x C chunks, of which rank
r holds chunks r and 2C - 1 - r: with causal attention an early chunk is cheap and a late one dear, so that
every rank has the same work. This is TransformerEngine's cut, which Megatron's rotary embedding of packed
rows takes for granted. The filling is at a sequence's end, where causality keeps it from being seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ContextShare:
    """The part of every sequence that rank `rank` of `size` context-parallel ranks holds."""

    rank: int
    size: int

    @property
    def multiple(self) -> int:
        """What the length of a sequence is filled up to a multiple of."""
        return sequence_multiple(self.size)

    def chunks(self) -> tuple[int, ...]:
        """Which of a sequence's `multiple` chunks are held, in order."""
        return (0,) if self.size == 1 else (self.rank, 2 * self.size - 1 - self.rank)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """For a row of T tokens in sequences of these lengths the places held, in the order in which they
        are held: [T / size] int64."""
        kept = set(self.chunks())
        chunk = torch.cat([torch.arange(n) // (n // self.multiple) for n in lengths])  # [T]
        return torch.nonzero(torch.isin(chunk, torch.tensor(sorted(kept)))).flatten()


WHOLE = ContextShare(rank=0, size=1)
"""No context parallelism: everything."""


def sequence_multiple(size: int) -> int:
    """Chunks that a sequence is cut into for so many context-parallel ranks."""
    return 1 if size == 1 else 2 * size


def rank_order(lengths: Sequence[int], size: int) -> Tensor:
    """Where each place of a row is found in the ranks' parts laid end to end: [T] int64."""
    laid = torch.cat([ContextShare(rank=rank, size=size).places(lengths) for rank in range(size)])
    found = torch.empty_like(laid)
    found[laid] = torch.arange(len(laid))
    return found
