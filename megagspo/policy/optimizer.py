"""Data parallelism, optimizer and learning-rate schedule, all Megatron's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megagspo.config.schema import Config


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module], dtype: torch.dtype, *, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """The model's chunks with gradients that are summed in float32 over data- and context-parallel ranks,
    once an optimizer step, and never scaled."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(
            chunk.config, ddp_config, Float16Module(chunk.config, chunk) if dtype == torch.bfloat16 else chunk
        )
        for chunk in chunks
    ]
    # The one place where Megatron's own scaling of losses is accounted for. calculate_per_token_loss
    # (model/build.py) makes DDP and the schedules add gradients up unscaled; what is left is the division
    # by a token count in finalize_model_grads, which is skipped by passing none. The weights of a
    # MiniBatch are the only normalisation.
    megatron_config: Any = chunks[0].config  # one for all chunks
    megatron_config.finalize_model_grads_func = lambda models, num_tokens=None, **kwargs: (
        finalize_model_grads(models, None, **kwargs)
    )
    no_syncs = [chunk.no_sync for chunk in wrapped]
    megatron_config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return wrapped


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: Config, dtype: torch.dtype) -> Any:
    """AdamW with float32 master weights and moments; clip_grad bounds the global gradient norm."""
    settings = config.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.name,
            lr=settings.lr,
            min_lr=settings.lr_min,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.trainer.distributed_optimizer,
        ),
        list(chunks),
    )


def build_schedule(optimizer: Any, config: Config, total_updates: int) -> OptimizerParamScheduler:
    """The learning rate as a function of the number of optimizer updates made, over the whole run.

    A resumed run sets that number from the checkpoint's count of updates, so the rate cannot drift from it.
    """
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr_min,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_updates, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
