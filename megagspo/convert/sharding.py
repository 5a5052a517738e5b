"""How a whole Megatron parameter is cut over tensor-parallel ranks, by its canonical name.

Attention and dense layers are cut over the tensor-parallel group, routed experts over the
expert-tensor-parallel group; the cut is the same. Norms and the router are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """axis: which axis is divided; blocks: a gated fc1 holds gate and up, each divided on its own (a rank's
    part is its gate rows over its up rows); vocabulary: rows are padded to the padded vocabulary before, and
    trimmed after."""

    axis: int
    blocks: int = 1
    vocabulary: bool = False

    def split(self, tensor: Tensor, parts: int) -> list[Tensor]:
        """The parts of a whole tensor, in rank order."""
        if parts == 1:
            return [tensor]
        blocks = [block.chunk(parts, dim=self.axis) for block in tensor.chunk(self.blocks, dim=self.axis)]
        return [torch.cat([block[part] for block in blocks], dim=self.axis) for part in range(parts)]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        if len(parts) == 1:
            return parts[0]
        blocks = [part.chunk(self.blocks, dim=self.axis) for part in parts]
        return torch.cat([part[block] for block in range(self.blocks) for part in blocks], dim=self.axis)


_CUTS: list[tuple[re.Pattern[str], Cut]] = [
    (re.compile(r"^embedding\.word_embeddings\.weight$|^output_layer\.weight$"), Cut(0, vocabulary=True)),
    (re.compile(r"\.linear_qkv\.(weight|bias)$"), Cut(0)),
    (re.compile(r"\.linear_proj\.weight$|\.linear_fc2\.weight$"), Cut(1)),
    (re.compile(r"\.linear_fc1\.(weight|bias)$"), Cut(0, blocks=2)),
]
_WHOLE = re.compile(r"layernorm\.weight$|\.router\.weight$")


def cut_of(canonical: str) -> Cut | None:
    """How the parameter is cut; None when every rank holds it whole. An unknown name is an error, never a
    guess."""
    for pattern, cut in _CUTS:
        if pattern.search(canonical):
            return cut
    if _WHOLE.search(canonical):
        return None
    raise AssertionError(f"no rule says how {canonical} is cut over tensor-parallel ranks")


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Zero rows below, up to `rows`."""
    missing = rows - tensor.shape[0]
    assert missing >= 0, f"{tensor.shape[0]} rows do not fit {rows}"
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
