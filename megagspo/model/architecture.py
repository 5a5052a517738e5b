"""What a Hugging Face `config.json` says about a model, in Megatron's words, and independent of how it is
parallelised."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagspo.config.layout import Layout
from megagspo.errors import ConfigError, MissingError, ModelError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """vocab_size: rows of the embedding, before any padding; transformer: arguments of Megatron's
    TransformerConfig."""

    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    rotary_base: float
    transformer: Mapping[str, Any]

    def with_transformer(self, **arguments: Any) -> Architecture:
        """A copy with further TransformerConfig arguments."""
        return dataclasses.replace(self, transformer={**self.transformer, **arguments})


def rope_base(hf: Mapping[str, Any]) -> float:
    """The rotary base, from either layout: `rope_theta`, or transformers 5's nested `rope_parameters`."""
    parameters = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {k: v for k, v in parameters.items() if k != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ModelError(f"config.json: rope scaling of type {kind!r} is not supported")
    return float(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)))


def read_config(model_path: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face directory. Raises MissingError or ModelError."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise MissingError(f"{file} does not exist: {model_path} is not a Hugging Face model directory")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}, not the settings of a model")
    return config


def families() -> list[str]:
    """The supported `model_type`s: each is a module of `megagspo.model.families`."""
    from megagspo.model import families as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def read_architecture(model_path: str | Path) -> Architecture:
    """The architecture of a Hugging Face directory, by its exact `model_type`."""
    hf = read_config(model_path)
    family = hf.get("model_type")
    if family not in families():
        raise ModelError(
            f"{model_path}/config.json: model_type {family!r} is not supported; "
            f"supported: {', '.join(families())}"
        )
    module = importlib.import_module(f"megagspo.model.families.{family}")
    try:
        return module.architecture(hf)
    except KeyError as error:
        raise ModelError(f"{model_path}/config.json lacks {error}, which {family} needs") from error


def active_weights(architecture: Architecture) -> int:
    """Weights that a token is multiplied with: attention projections, its top-k experts or the MLP, router,
    output matrix; the embedding is looked up."""
    sizes = architecture.transformer
    hidden = sizes["hidden_size"]
    heads = 2 * (sizes["num_attention_heads"] + sizes["num_query_groups"])  # query, output; key, value
    attention = hidden * sizes["kv_channels"] * heads
    if experts := sizes.get("num_moe_experts"):
        chosen = 3 * hidden * sizes["moe_ffn_hidden_size"] * sizes["moe_router_topk"]
        mlp = chosen + hidden * experts
    else:
        mlp = 3 * hidden * sizes["ffn_hidden_size"]
    return sizes["num_layers"] * (attention + mlp) + hidden * architecture.vocab_size


def quadratic_work(architecture: Architecture) -> float:
    """c such that a sequence of n tokens is about as much work as n + c n^2 tokens' matrix products.

    A token costs 2 W operations, W = `active_weights`. Causal attention makes n^2 / 2 pairs of a query and a
    key, each 2 operations a channel for the score and 2 for the value, in all L layers and heads x head_dim
    channels: 2 L heads head_dim n^2. The ratio is c = L heads head_dim / W. Backward takes about twice as
    long for both and drops out; norms, softmax and the optimizer grow with n or not at all, and are small.
    """
    sizes = architecture.transformer
    channels = sizes["num_layers"] * sizes["num_attention_heads"] * sizes["kv_channels"]
    return channels / active_weights(architecture)


def check_divides(architecture: Architecture, layout: Layout) -> None:
    """Raises ConfigError when the layout cuts something that the model does not divide into equal parts."""
    sizes = architecture.transformer
    experts = sizes.get("num_moe_experts")
    cuts: list[tuple[str, int, str, int | None]] = [
        ("parallel.tensor", layout.tensor, "attention heads", sizes["num_attention_heads"]),
        ("parallel.tensor", layout.tensor, "key/value heads", sizes["num_query_groups"]),
        ("parallel.pipeline", layout.pipeline, "layers", sizes["num_layers"]),
        (
            "parallel.virtual_pipeline",
            layout.virtual_pipeline,
            "layers a pipeline stage",
            sizes["num_layers"] // layout.pipeline,
        ),
        ("parallel.expert", layout.expert, "experts", experts),
        (
            "parallel.expert_tensor",
            layout.expert_tensor,
            "expert hidden units",
            sizes.get("moe_ffn_hidden_size"),
        ),
    ]
    if not experts:
        cuts.append(("parallel.tensor", layout.tensor, "MLP hidden units", sizes["ffn_hidden_size"]))
    if experts and layout.tensor > 1 and not layout.sequence:
        raise ConfigError(
            f"parallel.sequence=false with parallel.tensor={layout.tensor}: Megatron trains a mixture of "
            "experts with tensor parallelism only when activations are divided too: remove parallel.sequence"
        )
    for key, parts, what, size in cuts:
        if size is None and parts > 1:
            raise ConfigError(f"{key}={parts}, but the model has no {what}: set {key}=1")
        if size is not None and size % parts:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ConfigError(
                f"{key}={parts} does not divide the model's {size} {what}: use one of {divisors}"
            )
