"""Attention of packed rows against attention of each segment by itself."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megagspo.model.attention import PackedAttention, pack_segments
from megagspo.model.context import ContextShare, rank_order

LENGTHS = [[1], [7], [1, 1, 1], [5, 1, 9, 3, 8, 4, 2], [16, 17, 15], [3, 33]]
HEADS = [(4, 4), (4, 2), (6, 1)]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One segment in float64: query [S, Hq, D], key and value [S, Hkv, D] -> [S, Hq * D]."""
    queries_per_key = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(queries_per_key, dim=1).double() for tensor in (key, value))
    scores = torch.einsum("shd,thd->hst", query.double(), key) * scale
    steps = torch.arange(len(query))
    scores = scores.masked_fill(steps[:, None] < steps, -math.inf)
    return torch.einsum("hst,thd->shd", scores.softmax(-1), value).flatten(1)


def packed_attention(scale: float | None = None) -> PackedAttention:
    return PackedAttention(SimpleNamespace(context_parallel_size=1), softmax_scale=scale)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("query_heads", "key_heads"), HEADS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_segment_attends_to_itself_alone(
    lengths: list[int], query_heads: int, key_heads: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    total, dim = sum(lengths), 8
    query, key, value = (
        torch.randn(total, heads, dim, generator=generator).requires_grad_()
        for heads in (query_heads, key_heads, key_heads)
    )
    output = packed_attention(scale)(query, key, value, None, packed_seq_params=pack_segments(lengths))
    segments = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([causal_attention(q, k, v, scale or dim**-0.5) for q, k, v in segments])
    assert output.shape == (total, query_heads * dim)
    # Softmax averages of numbers up to 4 in float32: a few roundings of 5e-7.
    assert float((output - expected).abs().max()) < 2e-6
    slopes = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad(output, (query, key, value), slopes)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), slopes.double())
    for actual, right in zip(gradients, expected_gradients, strict=True):
        assert float((actual - right).abs().max()) < 2e-5  # sums over up to 33 such products


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 2), (6, 1)])
def test_context_ranks_together_compute_the_whole_row(
    size: int, lengths: list[int], query_heads: int, key_heads: int
) -> None:
    """Each rank's queries against the keys of all ranks laid end to end, as they are gathered; gradients of
    keys and values add up over ranks."""
    lengths = [length + -length % (2 * size) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    total, dim = sum(lengths), 8
    query, key, value = (
        torch.randn(total, heads, dim, generator=generator).requires_grad_()
        for heads in (query_heads, key_heads, key_heads)
    )
    shares = [ContextShare(rank=rank, size=size) for rank in range(size)]
    places = [share.places(lengths) for share in shares]
    laid = torch.cat(places)
    outputs = [
        packed_attention()(
            query[held], key[laid], value[laid], None, packed_seq_params=pack_segments(lengths, share=share)
        )
        for share, held in zip(shares, places, strict=True)
    ]
    segments = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([causal_attention(q, k, v, dim**-0.5) for q, k, v in segments])
    output = torch.cat(outputs)[rank_order(lengths, size)]
    assert float((output - expected).abs().max()) < 2e-6
    slopes = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad(output, (query, key, value), slopes)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), slopes.double())
    for actual, right in zip(gradients, expected_gradients, strict=True):
        assert float((actual - right).abs().max()) < 2e-5


@pytest.mark.parametrize("size", [2, 3, 8])
def test_context_ranks_have_equal_work(size: int) -> None:
    """Pairs of a query and a key it sees, over the held chunks."""
    length = 10 * 2 * size
    work = {
        sum(int(place) + 1 for place in ContextShare(rank=rank, size=size).places([length]))
        for rank in range(size)
    }
    assert max(work) == min(work)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_token_of_the_row_is_in_one_bucket_once(lengths: list[int]) -> None:
    plan = pack_segments(lengths)
    flat = torch.cat([bucket.queries.flatten() for bucket in plan.buckets])
    assert plan.restore is not None
    assert torch.equal(flat[plan.restore], torch.arange(sum(lengths)))
    assert len(set(plan.restore.tolist())) == sum(lengths)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_at_most_half_of_the_buckets_is_filling(lengths: list[int]) -> None:
    assert sum(bucket.queries.numel() for bucket in pack_segments(lengths).buckets) <= 2 * sum(lengths)


def test_boundaries_are_cumulative_lengths() -> None:
    plan = pack_segments([5, 1, 9])
    assert plan.cu_seqlens_q.tolist() == plan.cu_seqlens_kv.tolist() == [0, 5, 6, 15]
    assert plan.cu_seqlens_q.dtype == torch.int32
    assert plan.max_seqlen_q == plan.max_seqlen_kv == 9


def test_nan_in_one_segment_stays_there() -> None:
    query, key, value = torch.randn(3, 9, 2, 4)
    key[5] = math.nan
    output = packed_attention()(query, key, value, None, packed_seq_params=pack_segments([5, 4]))
    assert not output[:5].isnan().any()
    assert output[5:].isnan().any()
