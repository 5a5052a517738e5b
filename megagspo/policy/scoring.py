"""What the last pipeline stage makes of a micro-batch's hidden states: log-probabilities, entropies, loss.

Shapes: T tokens of this rank's row, D hidden, R loss tokens that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megagspo.algo.objective import Objective, token_batch
from megagspo.model.output import output_matrix
from megagspo.policy.batch import MicroBatch
from megagspo.policy.logprob import token_logprobs, vocabulary_part
from megagspo.types import MiniBatch


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The loss tokens of a micro-batch under the policy, laid end to end: [R] float32 each."""

    micro: MicroBatch
    logprobs: Tensor
    entropies: Tensor


def score(
    micro: MicroBatch, hidden: Tensor, last_chunk: Any, *, vocab_size: int, temperature: float
) -> Scored:
    """Hidden states [1, T, D] of the last chunk of the model -> log-probabilities and entropies."""
    weight = output_matrix(last_chunk)
    part = vocabulary_part(
        rows=len(weight),
        vocab_size=vocab_size,
        rank=parallel_state.get_tensor_model_parallel_rank(),
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    # Float16Module hands float32 over; back in the weights' format nothing is lost.
    chosen = hidden[0].index_select(0, micro.predictors).to(weight.dtype)  # [R, D]
    logprobs, entropies = token_logprobs(chosen, weight, micro.targets, part, temperature=temperature)
    return Scored(micro=micro, logprobs=logprobs, entropies=entropies)


def weighted_loss(scored: Scored, batch: MiniBatch, objective: Objective) -> Tensor:
    """The micro-batch's share of the loss at the tokens held: sum of weight x term."""
    micro, device = scored.micro, scored.logprobs.device
    terms = objective(
        token_batch(
            batch,
            micro.members,
            scored.logprobs,
            scored.entropies,
            tokens=micro.tokens,
            segments=micro.segments,
        )
    )
    weights = torch.tensor([batch.token_weights[i] for i in micro.members], device=device)
    return (micro.segments.spread(weights) * terms.loss).sum()
