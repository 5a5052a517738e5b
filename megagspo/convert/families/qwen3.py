"""Qwen3, dense."""

from megagspo.convert.rules import FusedQKV, GatedMLP, Rule, Same

_HF = "model.layers.{layer}"
_MEGATRON = "decoder.layers.{layer}"

ATTENTION: list[Rule] = [
    Same("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    Same("model.norm.weight", "decoder.final_layernorm.weight"),
    Same("lm_head.weight", "output_layer.weight"),
    Same(f"{_HF}.input_layernorm.weight", f"{_MEGATRON}.input_layernorm.weight"),
    FusedQKV(
        f"{_HF}.self_attn.q_proj.weight",
        f"{_HF}.self_attn.k_proj.weight",
        f"{_HF}.self_attn.v_proj.weight",
        f"{_MEGATRON}.self_attention.linear_qkv.weight",
    ),
    Same(f"{_HF}.self_attn.q_norm.weight", f"{_MEGATRON}.self_attention.q_layernorm.weight"),
    Same(f"{_HF}.self_attn.k_norm.weight", f"{_MEGATRON}.self_attention.k_layernorm.weight"),
    Same(f"{_HF}.self_attn.o_proj.weight", f"{_MEGATRON}.self_attention.linear_proj.weight"),
    Same(f"{_HF}.post_attention_layernorm.weight", f"{_MEGATRON}.pre_mlp_layernorm.weight"),
]

RULES: list[Rule] = [
    *ATTENTION,
    GatedMLP(
        f"{_HF}.mlp.gate_proj.weight", f"{_HF}.mlp.up_proj.weight", f"{_MEGATRON}.mlp.linear_fc1.weight"
    ),
    Same(f"{_HF}.mlp.down_proj.weight", f"{_MEGATRON}.mlp.linear_fc2.weight"),
]
