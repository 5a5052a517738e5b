"""Each rule against rows written out by hand, its inverse, and the coverage of a whole family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.convert.registry import bound_rules, families
from megagspo.convert.rules import Dimensions, FusedQKV, GatedMLP, Rule, Same, coverage
from megagspo.errors import ModelError


def dimensions(*, query_heads: int, key_value_heads: int, head_dim: int) -> Dimensions:
    return Dimensions(
        layers=2,
        experts=0,
        query_heads=query_heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocabulary=10,
        tied_embeddings=False,
    )


def heads(label: int, count: int, head_dim: int, width: int | None) -> Tensor:
    """Head n has the value label + n in all its rows."""
    rows = torch.repeat_interleave(label + torch.arange(count, dtype=torch.float32), head_dim)
    return rows if width is None else rows[:, None].expand(-1, width).clone()


@pytest.mark.parametrize("width", [None, 5], ids=["bias", "weight"])
@pytest.mark.parametrize("head_dim", [1, 3])
def test_fused_qkv_interleaves_by_key_value_group(head_dim: int, width: int | None) -> None:
    """B11: 4 query heads and 2 key/value heads are q0 q1 k0 v0 q2 q3 k1 v1; 4 x head_dim need not be the
    hidden size."""
    rule = FusedQKV("q", "k", "v", "qkv")
    sizes = dimensions(query_heads=4, key_value_heads=2, head_dim=head_dim)
    q, k, v = heads(0, 4, head_dim, width), heads(100, 2, head_dim, width), heads(200, 2, head_dim, width)
    fused = rule.to_megatron([q, k, v], sizes)
    first = fused if width is None else fused[:, 0]
    assert first[::head_dim].tolist() == [0, 1, 100, 200, 2, 3, 101, 201]
    for part, whole in zip(rule.to_hf(fused, sizes), (q, k, v), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.parametrize(("query_heads", "key_value_heads"), [(1, 1), (4, 4), (8, 1), (6, 3), (16, 2)])
def test_every_rule_is_inverted_by_its_inverse(query_heads: int, key_value_heads: int) -> None:
    sizes = dimensions(query_heads=query_heads, key_value_heads=key_value_heads, head_dim=4)
    cases: list[tuple[Rule, Sequence[Tensor]]] = [
        (Same("a", "m"), [torch.randn(3, 5)]),
        (GatedMLP("g", "u", "m"), [torch.randn(6, 5), torch.randn(6, 5)]),
        (
            FusedQKV("q", "k", "v", "m"),
            [torch.randn(4 * n, 7) for n in (query_heads, key_value_heads, key_value_heads)],
        ),
    ]
    for rule, tensors in cases:
        back = rule.to_hf(rule.to_megatron(tensors, sizes), sizes)
        assert len(back) == len(tensors) == len(rule.hf)
        assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


def test_gate_is_above_up() -> None:
    fused = GatedMLP("g", "u", "m").to_megatron(
        [torch.zeros(2, 3), torch.ones(2, 3)], dimensions(query_heads=1, key_value_heads=1, head_dim=1)
    )
    assert fused[:, 0].tolist() == [0, 0, 1, 1]


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "vocab_size": 300,
    }
    return {**config, **changes}


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("tied", [False, True])
def test_every_name_is_consumed_exactly_once(family: str, tied: bool) -> None:
    bound, _ = bound_rules(hf_config(family, tie_word_embeddings=tied))
    for names in ([item.megatron for item in bound], [name for item in bound for name in item.hf]):
        assert [name for name, count in Counter(names).items() if count > 1] == []
        assert not [name for name in names if "{" in name]
    assert ("lm_head.weight" in {name for item in bound for name in item.hf}) is not tied


def test_coverage_lists_all_that_is_missing_and_all_that_is_surplus() -> None:
    bound, _ = bound_rules(hf_config("qwen3_moe"))
    names = {name for item in bound for name in item.hf}
    assert coverage(bound, names) == ([], [])
    lost = {"model.layers.0.mlp.gate.weight", "model.layers.2.mlp.experts.3.down_proj.weight"}
    missing, surplus = coverage(bound, names - lost | {"b", "a"})
    assert missing == sorted(lost)
    assert surplus == ["a", "b"]


def test_either_name_of_the_number_of_experts_is_read() -> None:
    config = hf_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    assert bound_rules(config)[1].experts == 4


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'qwen9'.*qwen3, qwen3_moe"):
        bound_rules(hf_config("qwen9"))
