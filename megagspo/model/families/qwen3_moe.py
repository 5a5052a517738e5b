"""Qwen3-MoE: Qwen3 with every MLP a softmax-routed mixture of experts, no shared expert (arXiv
2505.09388)."""

from __future__ import annotations

from typing import Any

from megagspo.errors import ModelError
from megagspo.model.architecture import Architecture
from megagspo.model.families import qwen3


def architecture(hf: dict[str, Any]) -> Architecture:
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            "config.json: mlp_only_layers / decoder_sparse_step mix dense layers into Qwen3-MoE; "
            "only models whose every layer is a mixture of experts are supported"
        )
    return qwen3.architecture(hf).with_transformer(
        # transformers 5 may write the second name alone
        num_moe_experts=hf.get("num_experts") or hf["num_local_experts"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_router_topk=hf["num_experts_per_tok"],
        # norm_topk_prob: softmax over all experts, the chosen weights renormalised. That equals the softmax
        # over the chosen logits alone, which is Megatron's form; without renormalising the softmax comes
        # first.
        moe_router_pre_softmax=not hf["norm_topk_prob"],
    )
