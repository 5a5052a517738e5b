"""Process groups and seeds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megagspo.config.schema import Layout
from megagspo.platform.device import Platform
from megagspo.platform.world import World


@contextmanager
def process_groups(layout: Layout, platform: Platform, world: World, *, seed: int) -> Iterator[None]:
    """Torch's default group and Megatron's parallel groups for the layout, for the length of the context.

    seed: Megatron derives the seeds of tensor- and expert-parallel ranks from it. Weights come from a
    checkpoint and dropout is 0, so nothing in a step draws from these generators; they are set so that a run
    repeated is a run repeated.
    """
    from megatron.core import parallel_state, tensor_parallel

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        assert world.size == 1, "MASTER_PORT is set by whoever starts several ranks"
        os.environ["MASTER_PORT"] = "0"
    dist.init_process_group(
        platform.backend, rank=world.rank, world_size=world.size, timeout=datetime.timedelta(minutes=30)
    )
    try:
        with platform.megatron_calls():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                virtual_pipeline_model_parallel_size=(
                    layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
                ),
                context_parallel_size=layout.context,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=layout.expert_tensor,
            )
            torch.manual_seed(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
