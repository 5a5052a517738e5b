"""Qwen3, dense: grouped-query attention with q/k norms, SwiGLU, no biases (arXiv 2505.09388)."""

from __future__ import annotations

from typing import Any

from megagspo.model.architecture import Architecture, rope_base


def architecture(hf: dict[str, Any]) -> Architecture:
    return Architecture(
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        tied_embeddings=hf.get("tie_word_embeddings", False),
        rotary_base=rope_base(hf),
        transformer={
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            "layernorm_epsilon": hf["rms_norm_eps"],
            "qk_layernorm": True,
        },
    )
