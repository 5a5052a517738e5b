"""Responses inside a packed row of tokens: per-response sums and means without padding.

Shapes: R response tokens of a micro-batch, laid end to end; N responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """ids [R] int64: the response each token belongs to; lengths [N] float32: response tokens of each
    response."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Segments:
        """Segments of the given lengths, in order. A length of 0 gives a response without tokens, whose mean
        is 0."""
        sizes = torch.tensor(lengths, dtype=torch.int64, device=device)
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        return cls(ids=ids, lengths=sizes.to(torch.float32))

    def sum(self, x: Tensor) -> Tensor:
        """[R] -> [N], differentiable."""
        return x.new_zeros(self.lengths.shape[0]).index_add(0, self.ids, x)

    def mean(self, x: Tensor) -> Tensor:
        """[R] -> [N]: each response's mean over its own tokens, differentiable."""
        return self.sum(x) / self.lengths.to(x.dtype).clamp(min=1)

    def spread(self, y: Tensor) -> Tensor:
        """[N] -> [R]: each response's value at each of its tokens."""
        return y.index_select(0, self.ids)
