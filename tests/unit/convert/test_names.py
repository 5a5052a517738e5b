"""Canonical names of live parameters, for the torch spec and for TransformerEngine's."""

from __future__ import annotations

import pytest

from megagspo.convert.names import canonical_name, is_expert
from megagspo.convert.registry import bound_rules
from megagspo.convert.sharding import cut_of

# Parameters of a two-layer Qwen3-MoE with 4 experts, built from Megatron-Core 0.19.2's TransformerEngine
# layer spec.
LAYER = "decoder.layers.{layer}."
TRANSFORMER_ENGINE_LAYER = {
    "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.experts.linear_fc1.weight0": "mlp.experts.0.linear_fc1.weight",
    "mlp.experts.linear_fc1.weight3": "mlp.experts.3.linear_fc1.weight",
    "mlp.experts.linear_fc2.weight0": "mlp.experts.0.linear_fc2.weight",
    "mlp.experts.linear_fc2.weight3": "mlp.experts.3.linear_fc2.weight",
}
DENSE_TRANSFORMER_ENGINE_LAYER = {
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
}
OUTSIDE = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 128,
    "num_experts": 4,
}


@pytest.mark.parametrize("live", [*TRANSFORMER_ENGINE_LAYER, *DENSE_TRANSFORMER_ENGINE_LAYER])
@pytest.mark.parametrize("layer", [0, 1])
def test_transformer_engine_names_become_the_torch_specs(live: str, layer: int) -> None:
    expected = {**TRANSFORMER_ENGINE_LAYER, **DENSE_TRANSFORMER_ENGINE_LAYER}[live]
    name = canonical_name(f"decoder.layers.{layer}.{live}", first_layer=0, first_expert=0)
    assert name == f"decoder.layers.{layer}.{expected}"


def test_all_canonical_names_of_a_transformer_engine_model_are_those_of_the_rules() -> None:
    experts = [f"mlp.experts.linear_{part}.weight{expert}" for part in ("fc1", "fc2") for expert in range(4)]
    per_layer = [name for name in TRANSFORMER_ENGINE_LAYER if ".experts." not in name] + experts
    live = OUTSIDE + [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in per_layer]
    bound, _ = bound_rules({"model_type": "qwen3_moe", **SIZES})
    assert {canonical_name(name, first_layer=0, first_expert=0) for name in live} == {
        item.megatron for item in bound
    }


def test_layers_and_experts_are_numbered_over_the_whole_model() -> None:
    place = {"first_layer": 6, "first_expert": 8}
    grouped = canonical_name("decoder.layers.1.mlp.experts.linear_fc2.weight3", **place)
    local = canonical_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight", **place)
    assert grouped == local == "decoder.layers.7.mlp.experts.11.linear_fc2.weight"
    assert (
        canonical_name("decoder.layers.0.mlp.router.weight", **place) == "decoder.layers.6.mlp.router.weight"
    )


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_of_layers_stay(name: str) -> None:
    assert canonical_name(name, first_layer=6, first_expert=8) == name


def test_only_routed_experts_are_experts() -> None:
    assert is_expert("decoder.layers.7.mlp.experts.11.linear_fc2.weight")
    assert not is_expert("decoder.layers.7.mlp.shared_experts.linear_fc2.weight")
    assert not is_expert("decoder.layers.7.mlp.router.weight")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_parameter_of_a_family_has_a_known_cut(family: str) -> None:
    bound, _ = bound_rules({"model_type": family, **SIZES})
    whole = {item.megatron.rsplit(".", 2)[-2] for item in bound if cut_of(item.megatron) is None}
    norms = {"input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "final_layernorm"}
    assert whole == norms | ({"router"} if family == "qwen3_moe" else set())


def test_unknown_parameter_is_never_guessed() -> None:
    with pytest.raises(AssertionError, match="linear_q_down_proj"):
        cut_of("decoder.layers.0.self_attention.linear_q_down_proj.weight")
