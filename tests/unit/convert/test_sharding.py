"""Cuts over tensor-parallel ranks: what a rank holds, and that merging undoes splitting."""

from __future__ import annotations

import pytest
import torch

from megagspo.convert.sharding import Cut, cut_of, pad_rows

NAMES = [
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.mlp.experts.5.linear_fc1.weight",
    "decoder.layers.0.mlp.experts.5.linear_fc2.weight",
]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_merge_undoes_split(name: str, parts: int) -> None:
    cut = cut_of(name)
    assert cut is not None
    whole = torch.randn(16, 24)
    pieces = cut.split(whole, parts)
    assert len(pieces) == parts
    assert len({piece.shape for piece in pieces}) == 1
    assert sum(piece.numel() for piece in pieces) == whole.numel()
    assert torch.equal(cut.merge(pieces), whole)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.bias"]
)
def test_gate_and_up_are_cut_each_on_its_own(name: str) -> None:
    """B9: ranks hold gate0 up0 and gate1 up1; the whole is gate0 gate1 up0 up1."""
    cut = cut_of(name)
    assert cut is not None
    rank0, rank1 = torch.tensor([0, 0, 10, 10]), torch.tensor([1, 1, 11, 11])
    if name.endswith("weight"):
        rank0, rank1 = (part[:, None].expand(-1, 3) for part in (rank0, rank1))
    whole = cut.merge([rank0, rank1])
    first = whole[:, 0] if whole.dim() == 2 else whole
    assert first.tolist() == [0, 0, 1, 1, 10, 10, 11, 11]
    assert all(
        torch.equal(one, other) for one, other in zip(cut.split(whole, 2), (rank0, rank1), strict=True)
    )


def test_cut_axis_is_the_only_one_that_changes() -> None:
    """B9, three axes: two parts of [2, 4, 3] cut on axis 2 are [2, 4, 6], the first axis untouched."""
    merged = Cut(2).merge([torch.zeros(2, 4, 3), torch.ones(2, 4, 3)])
    assert merged.shape == (2, 4, 6)
    assert merged[0, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_padding_rows_are_zero_and_below() -> None:
    padded = pad_rows(torch.ones(10, 3), 16)
    assert padded.shape == (16, 3)
    assert padded[:10].eq(1).all()
    assert padded[10:].eq(0).all()


def test_tensor_without_padding_is_not_copied() -> None:
    whole = torch.ones(16, 3)
    assert pad_rows(whole, 16) is whole
