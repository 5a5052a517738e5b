"""Micro-batches through Megatron's pipeline schedules: with one stage, with several, and interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megagspo.config.schema import Layout
from megagspo.platform.device import Platform
from megagspo.policy.batch import MicroBatch


def count_multiple(layout: Layout) -> int:
    """What the number of micro-batches has to be a multiple of: the interleaved schedule lets each chunk work
    on as many micro-batches in a row as there are stages. What is missing is filled up with micro-batches
    without sequences."""
    return layout.pipeline if layout.virtual_pipeline > 1 else 1


def run_micro_batches(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    loss: Callable[..., Any],
    *,
    layout: Layout,
    platform: Platform,
    forward_only: bool,
) -> None:
    """Every micro-batch through all chunks of the model, this rank's and the others'.

    loss(micro, hidden [1, T, D]) is called on the last stage, once a micro-batch, with what Megatron wants
    back from it: (the micro-batch's share of the loss, a count of tokens, {}), or (any scalar, {}) where
    forward_only. Returns when gradients are summed over all ranks.
    """

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[Tensor, Any]:
        micro = next(data_iterator)
        output = chunk(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            attention_mask=None,
            packed_seq_params=micro.packing,
        )
        return output, partial(loss, micro)

    iterators = [iter(micro_batches) for _ in chunks]
    with platform.megatron_calls():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(micro_batches),
            # The schedules ask for it; rows of any length travel.
            seq_length=micro_batches[0].input_ids.shape[1] * layout.context,
            micro_batch_size=1,
            forward_only=forward_only,
        )
