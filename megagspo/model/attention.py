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
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagspo.model.context import WHOLE, ContextShare, rank_order


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Queries of like number that see like numbers of keys, for one attention call.

    queries [n, S]: places in this rank's row; keys [n, S']: places in all ranks' rows laid end to end; both
    filled up with 0. mask [n, 1, S, S'] bool: which keys a query sees; None: query t sees keys 0 to t.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed row, of the whole one under context parallelism, with the gather
    plan that `PackedAttention` shares over all layers.

    restore: [T] where each token of this rank's row is found in the buckets' queries laid end to end.
    """

    buckets: list[Bucket] = field(default_factory=list)
    restore: Tensor | None = None


def pack_segments(
    lengths: Sequence[int], *, share: ContextShare = WHOLE, device: torch.device | str = "cpu"
) -> PackedSegments:
    """Describes a row of segments of the given lengths, in order, each a multiple of `share.multiple`. A
    segment attends to itself alone, causally.

    The held chunks of all segments are bucketed by the next powers of two of their length and of the number
    of keys they see, so that at most half of a bucket is filling and one attention call serves many segments.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(device)
    longest = int(sizes.max())
    buckets, restore = _buckets(sizes, share, rank_order(lengths, share.size))
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=[
            Bucket(
                queries=bucket.queries.to(device),
                keys=bucket.keys.to(device),
                mask=None if bucket.mask is None else bucket.mask.to(device),
            )
            for bucket in buckets
        ],
        restore=restore.to(device),
    )


def _buckets(sizes: Tensor, share: ContextShare, order: Tensor) -> tuple[list[Bucket], Tensor]:
    """sizes [n]: lengths of the segments; order [T]: see `rank_order`."""
    chunk = sizes // share.multiple
    held = chunk * len(share.chunks())
    own_start = torch.cumsum(held, 0) - held  # in this rank's row
    row_start = torch.cumsum(sizes, 0) - sizes
    # One piece for each held chunk of each segment: its queries, and the keys up to its own end.
    count = torch.cat([chunk for _ in share.chunks()])
    start = torch.cat([own_start + number * chunk for number, _ in enumerate(share.chunks())])
    first = torch.cat([which * chunk for which in share.chunks()])  # the first query's position
    keys_start = row_start.repeat(len(share.chunks()))
    classes = torch.stack([_power_of_two(count), _power_of_two(first + count)], dim=1)

    buckets: list[Bucket] = []
    restore = torch.empty(int(held.sum()), dtype=torch.int64)
    offset = 0
    for size_class in torch.unique(classes, dim=0):
        members = torch.nonzero((classes == size_class).all(dim=1)).flatten()
        queries, real = _filled(start[members], count[members])
        keys, seen = _filled(keys_start[members], (first + count)[members])
        mask = None
        if share.size > 1:  # a query that is filling sees key 0, for a softmax over nothing is NaN
            position = torch.where(real, first[members, None] + torch.arange(queries.shape[1]), 0)
            mask = (torch.arange(keys.shape[1]) <= position[..., None])[:, None]
        buckets.append(Bucket(queries=queries, keys=torch.where(seen, order[keys], 0), mask=mask))
        restore[queries[real]] = (offset + torch.arange(queries.numel()).view_as(queries))[real]
        offset += queries.numel()
    return buckets, restore


def _power_of_two(counts: Tensor) -> Tensor:
    """The exponent of the next power of two."""
    return torch.tensor([max(0, int(count) - 1).bit_length() for count in counts])


def _filled(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of places as rows of one matrix, [n, S], filled up with 0; and which entries are real."""
    steps = torch.arange(int(counts.max()))
    real = steps < counts[:, None]
    return torch.where(real, starts[:, None] + steps, 0), real


class PackedAttention(torch.nn.Module):
    """Causal softmax(q k^T * scale) v within each segment of a packed row, grouped-query heads included.

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]. Under context parallelism T are this rank's
    tokens, and keys and values of all ranks are gathered; in backward their gradients go back, summed, to the
    ranks they came from. Raises nothing of its own; shapes are Megatron's business.
    """

    def __init__(
        self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None

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
        if self.context_group is not None:
            both = torch.stack([key, value], dim=1)  # one message
            key, value = gather_from_sequence_parallel_region(both, group=self.context_group).unbind(dim=1)
        outputs = []
        for bucket in packed_seq_params.buckets:
            q = _take(query, bucket.queries)  # [n, H, S, D]
            k, v = (_take(tensor, bucket.keys) for tensor in (key, value))  # [n, H, S', D]
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [n * S, Hq * D]
        assert packed_seq_params.restore is not None
        return torch.cat(outputs).index_select(0, packed_seq_params.restore)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """[T, H, D] and [n, S] -> [n, H, S, D]."""
    return tensor.index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:]).transpose(1, 2)
