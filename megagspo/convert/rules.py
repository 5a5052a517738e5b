"""The words in which a family's file says how its Hugging Face tensors and Megatron parameters correspond.

A rule is declarative and invertible: it names its tensors on both sides and knows how to turn one side into
the other. Import, export and weight push all read the same rules. Rules speak of whole tensors under
canonical Megatron names: the torch layer spec's, with layers and experts numbered over the whole model
(`convert/names.py`). How a tensor is cut over ranks is no business of theirs (`convert/sharding.py`).

Templates hold `{layer}` and `{expert}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes that rules need. experts is 0 for a dense model."""

    layers: int
    experts: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool


class Rule(Protocol):
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    @property
    def megatron(self) -> str:
        """The canonical Megatron name template."""

    @property
    def hf(self) -> Sequence[str]:
        """Hugging Face name templates, in a fixed order."""

    def to_megatron(self, tensors: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        """The whole Megatron parameter, from tensors in the order of `hf`."""

    def to_hf(self, tensor: Tensor, dimensions: Dimensions) -> Sequence[Tensor]:
        """The inverse of `to_megatron`."""


@dataclass(frozen=True)
class Same:
    """The same tensor under another name."""

    name: str
    megatron: str

    @property
    def hf(self) -> Sequence[str]:
        return (self.name,)

    def to_megatron(self, tensors: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        return tensors[0]

    def to_hf(self, tensor: Tensor, dimensions: Dimensions) -> Sequence[Tensor]:
        return (tensor,)


@dataclass(frozen=True)
class FusedQKV:
    """q, k and v rows interleaved by key/value group: q of group 0, k 0, v 0, q of group 1, ... (Megatron's
    linear_qkv).

    q [Hq D, hidden], k and v [Hkv D, hidden] <-> [Hkv (Hq / Hkv + 2) D, hidden]; biases likewise, without the
    hidden axis.
    """

    q: str
    k: str
    v: str
    megatron: str

    @property
    def hf(self) -> Sequence[str]:
        return (self.q, self.k, self.v)

    def to_megatron(self, tensors: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        groups, rest = dimensions.key_value_heads, tensors[0].shape[1:]
        parts = [tensor.reshape(groups, -1, *rest) for tensor in tensors]  # [Hkv, rows, hidden]
        return torch.cat(parts, dim=1).reshape(-1, *rest)

    def to_hf(self, tensor: Tensor, dimensions: Dimensions) -> Sequence[Tensor]:
        groups, rest = dimensions.key_value_heads, tensor.shape[1:]
        queries = dimensions.query_heads // groups * dimensions.head_dim
        grouped = tensor.reshape(groups, -1, *rest)
        parts = grouped.split([queries, dimensions.head_dim, dimensions.head_dim], dim=1)
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class GatedMLP:
    """gate over up, as Megatron's linear_fc1 of a gated linear unit holds them: two [ffn, hidden] <-> [2 ffn,
    hidden]."""

    gate: str
    up: str
    megatron: str

    @property
    def hf(self) -> Sequence[str]:
        return (self.gate, self.up)

    def to_megatron(self, tensors: Sequence[Tensor], dimensions: Dimensions) -> Tensor:
        return torch.cat(list(tensors))

    def to_hf(self, tensor: Tensor, dimensions: Dimensions) -> Sequence[Tensor]:
        return tensor.chunk(2)


@dataclass(frozen=True)
class Bound:
    """A rule for one layer and expert: its templates filled in."""

    rule: Rule
    megatron: str
    hf: tuple[str, ...]


def expand(rules: Sequence[Rule], dimensions: Dimensions) -> list[Bound]:
    """Every rule for every layer and expert, in a fixed order: outer tensors first, then layer by layer.

    The output layer of a tied model is the embedding itself and has no parameter: rules for it are left out.
    """
    bound: list[Bound] = []

    def bind(rule: Rule, **numbers: int) -> None:
        names = tuple(name.format(**numbers) for name in rule.hf)
        bound.append(Bound(rule=rule, megatron=rule.megatron.format(**numbers), hf=names))

    per_layer = [rule for rule in rules if "{layer}" in rule.megatron]
    for rule in rules:
        tied = dimensions.tied_embeddings and rule.megatron == "output_layer.weight"
        if rule not in per_layer and not tied:
            bind(rule)
    for layer in range(dimensions.layers):
        for rule in per_layer:
            if "{expert}" not in rule.megatron:
                bind(rule, layer=layer)
                continue
            for expert in range(dimensions.experts):
                bind(rule, layer=layer, expert=expert)
    return bound


def coverage(bound: Sequence[Bound], present: Mapping[str, object] | set[str]) -> tuple[list[str], list[str]]:
    """Which Hugging Face names the rules want but are not present, and which are present but no rule
    takes."""
    wanted = {name for item in bound for name in item.hf}
    return sorted(wanted - set(present)), sorted(set(present) - wanted)
