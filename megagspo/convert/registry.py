"""Finds a model's rules by its exact `model_type`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from megagspo.convert.rules import Bound, Dimensions, expand
from megagspo.errors import ModelError


def families() -> list[str]:
    """The `model_type`s that have rules: each is a module of `megagspo.convert.families`."""
    from megagspo.convert import families as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def dimensions_of(hf: Mapping[str, Any]) -> Dimensions:
    """The sizes rules need, from `config.json`."""
    return Dimensions(
        layers=hf["num_hidden_layers"],
        experts=hf.get("num_experts") or hf.get("num_local_experts", 0),
        query_heads=hf["num_attention_heads"],
        key_value_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocabulary=hf["vocab_size"],
        tied_embeddings=hf.get("tie_word_embeddings", False),
    )


def bound_rules(hf: Mapping[str, Any]) -> tuple[list[Bound], Dimensions]:
    """Every rule of the model that `config.json` describes, for every layer and expert."""
    family = hf.get("model_type")
    if family not in families():
        raise ModelError(f"model_type {family!r} has no conversion rules; known: {', '.join(families())}")
    rules = importlib.import_module(f"megagspo.convert.families.{family}").RULES
    dimensions = dimensions_of(hf)
    return expand(rules, dimensions), dimensions
