"""Attention over packed sequences with torch's scaled-dot-product attention.

Megatron's own torch attention builds the whole score matrix and refuses packed sequences; TransformerEngine's
needs a GPU. This module plugs into the same place of the layer spec (`core_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed row, with the gather plan that `PackedAttention` shares over all
    layers.

    buckets: for each bucket of segments of like length an index [n, S] into the row, short segments filled up
    with 0 (causality keeps the filling from being seen); restore: [T] where each token of the row is found in
    the buckets laid end to end.
    """

    buckets: list[Tensor] = field(default_factory=list)
    restore: Tensor | None = None


def pack_segments(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedSegments:
    """Describes a row of segments of the given lengths, in order. A segment attends to itself alone,
    causally.

    Segments are bucketed by the next power of two of their length, so that at most half of a bucket is
    filling and one attention call serves many segments.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    starts = ends - sizes
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(device)
    longest = int(sizes.max())

    buckets: list[Tensor] = []
    restore = torch.empty(int(ends[-1]), dtype=torch.int64)
    offset = 0
    classes = torch.tensor([max(0, length - 1).bit_length() for length in lengths])
    for size_class in torch.unique(classes).tolist():
        members = torch.nonzero(classes == size_class).flatten()
        width = int(sizes[members].max())
        steps = torch.arange(width)
        real = steps < sizes[members, None]  # [n, S]
        index = torch.where(real, starts[members, None] + steps, 0)
        buckets.append(index.to(device))
        positions = offset + torch.arange(index.numel()).view_as(index)
        restore[index[real]] = positions[real]
        offset += index.numel()
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=buckets,
        restore=restore.to(device),
    )


class PackedAttention(torch.nn.Module):
    """Causal softmax(q k^T * scale) v within each segment of a packed row, grouped-query heads included.

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]. Raises nothing of its own; shapes are
    Megatron's business.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "packed torch attention does not split sequences over ranks"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **_: Any,
    ) -> Tensor:
        outputs = []
        for index in packed_seq_params.buckets:
            q, k, v = (_take(tensor, index) for tensor in (query, key, value))  # [n, H, S, D]
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [n * S, Hq * D]
        assert packed_seq_params.restore is not None
        return torch.cat(outputs).index_select(0, packed_seq_params.restore)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """[T, H, D] and [n, S] -> [n, H, S, D]."""
    return tensor.index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:]).transpose(1, 2)
