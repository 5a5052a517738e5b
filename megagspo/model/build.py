"""Builds the Megatron model: the only place of the package that knows which Megatron class a policy is."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from megagspo.config.schema import Layout, Recompute
from megagspo.model.architecture import Architecture, check_divides
from megagspo.model.attention import PackedAttention
from megagspo.model.norm import RMSNorm
from megagspo.model.output import return_hidden_states
from megagspo.platform.device import Platform

VOCABULARY_DIVISOR = 128
"""Embedding rows per tensor-parallel rank are padded to a multiple of this, as Megatron-LM does."""


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Rows of the padded embedding: the next multiple of VOCABULARY_DIVISOR x tensor-parallel size."""
    multiple = VOCABULARY_DIVISOR * tensor
    return -(-vocab_size // multiple) * multiple


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    # The insides of experts and dense MLPs are most of what a layer keeps: top-k times its tokens, several
    # expert widths each. Both kinds of module are there with either spec. Attention is left out: the kernels
    # of both keep no scores and compute them again as it is.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
}


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    platform: Platform,
    dtype: torch.dtype,
    recompute: Recompute = "none",
) -> TransformerConfig:
    """Megatron's configuration for this model in this layout.

    calculate_per_token_loss: Megatron then sums gradients over micro-batches and data-parallel ranks as they
    are; our loss weights already hold every normalisation (see `policy/policy.py`).
    """
    interleaved = layout.virtual_pipeline > 1
    return TransformerConfig(
        **architecture.transformer,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if interleaved else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The values are overwritten at once, but it is in initialisation that Megatron marks parameters as
        # tensor-parallel; unmarked ones are taken for duplicates and dropped from the gradient norm.
        perform_initialization=True,
        use_cpu_initialization=platform.is_cpu,
        variable_seq_lengths=layout.pipeline > 1,
        # The interleaved schedule has several messages between the same two ranks under way, which have to be
        # sent and awaited one by one: batched, gloo hangs.
        batch_p2p_comm=not (platform.is_cpu or interleaved),
        overlap_p2p_comm=interleaved,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_grouped_gemm=uses_transformer_engine(platform),
        gradient_accumulation_fusion=False,
        **_RECOMPUTE[recompute],
    )


def uses_transformer_engine(platform: Platform) -> bool:
    """TransformerEngine's layers are used when they are installed and there is a GPU to run them."""
    return not platform.is_cpu and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(config: TransformerConfig, platform: Platform, chunk: int | None) -> Any:
    """The block spec of a chunk: TransformerEngine's modules, or Megatron's torch modules with our norm and
    attention."""
    if uses_transformer_engine(platform):
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=chunk
        )
    block = copy.deepcopy(
        get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
        )
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


def build_model(
    architecture: Architecture,
    layout: Layout,
    platform: Platform,
    dtype: torch.dtype,
    *,
    recompute: Recompute = "none",
) -> list[torch.nn.Module]:
    """This rank's part of the model, one chunk or with a virtual pipeline several, in the order in which a
    micro-batch visits them. Parameters are not yet set: the caller loads a checkpoint or Hugging Face
    weights."""
    check_divides(architecture, layout)
    with platform.megatron_calls():
        config = transformer_config(architecture, layout, platform, dtype, recompute)
        if layout.virtual_pipeline == 1:
            return [_chunk(config, architecture, layout, platform, None)]
        numbers = range(layout.virtual_pipeline)
        return [_chunk(config, architecture, layout, platform, number) for number in numbers]


def _chunk(
    config: TransformerConfig,
    architecture: Architecture,
    layout: Layout,
    platform: Platform,
    number: int | None,
) -> torch.nn.Module:
    """number: which chunk of a virtual pipeline; None without one."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, platform, number),
        vocab_size=padded_vocabulary(architecture.vocab_size, layout.tensor),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        parallel_output=True,
        vp_stage=number,
    ).to(platform.device)
    return_hidden_states(model)
    _mark_experts(model)
    return model


def _mark_experts(model: torch.nn.Module) -> None:
    """Has the gradients of routed experts summed over the expert-data-parallel ranks, always.

    Megatron 0.16 marks them so only where expert parallelism is above 1. With TP = 2, EP = 1 and
    expert-tensor parallel 1 each tensor-parallel rank holds every expert whole but has seen half of the
    tokens, and the gradients would stay apart in silence. 0.19 marks them there as well; where it does not,
    the two groups of ranks are the same.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010 - not a field of Parameter
