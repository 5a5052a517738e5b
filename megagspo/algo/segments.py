"""Responses inside a packed row of tokens: per-response sums and means without padding.

Shapes: R response tokens of a micro-batch, laid end to end; N responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """ids [R] int64: the response each token belongs to; lengths [N] float32: response tokens of each
    response.

    total: where the R tokens are a part of the responses' tokens, and others hold the rest, it makes partial
    sums [N] whole; differentiable, with a gradient that is the sum of what all holders ask for. None: the
    tokens are all there are.
    """

    ids: Tensor
    lengths: Tensor
    total: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Segments:
        """Segments of the given lengths, in order. A length of 0 gives a response without tokens, whose mean
        is 0."""
        sizes = torch.tensor(lengths, dtype=torch.int64, device=device)
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        return cls(ids=ids, lengths=sizes.to(torch.float32))

    def part(self, tokens: Tensor, total: Callable[[Tensor], Tensor] | None) -> Segments:
        """The same responses where only these of the tokens are held."""
        return replace(self, ids=self.ids[tokens], total=total)

    def sum(self, x: Tensor) -> Tensor:
        """[R] -> [N]: over all of a response's tokens, whoever holds them; differentiable."""
        held = x.new_zeros(self.lengths.shape[0]).index_add(0, self.ids, x)
        return held if self.total is None else self.total(held)

    def mean(self, x: Tensor) -> Tensor:
        """[R] -> [N]: each response's mean over all of its tokens, differentiable."""
        return self.sum(x) / self.lengths.to(x.dtype).clamp(min=1)

    def spread(self, y: Tensor) -> Tensor:
        """[N] -> [R]: each response's value at each of its tokens."""
        return y.index_select(0, self.ids)
