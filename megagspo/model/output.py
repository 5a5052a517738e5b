"""The model's last layer as the learner wants it: hidden states out, logits never made whole.

A row of logits is as wide as the vocabulary, far wider than anything else in the model.
`policy/logprob.py` goes from hidden states to log-probabilities in chunks; this module makes Megatron's model
hand the hidden states over.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class HiddenStatesOutput(ColumnParallelLinear):
    """Holds the output matrix as `ColumnParallelLinear` does and returns its input: all tokens on every
    tensor-parallel rank, [T, 1, D].

    In backward the ranks' gradients, each from its own part of the vocabulary, are added up, and under
    sequence parallelism cut by tokens again.
    """

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(input_), None


def return_hidden_states(model: Any) -> None:
    """The last pipeline stage's forward gives hidden states [1, T, D] from here on.

    The layer keeps its parameters and the marks that Megatron gave them: it changes its class, nothing else.
    """
    if model.post_process:
        assert type(model.output_layer) is ColumnParallelLinear, "another output layer than was expected"
        model.output_layer.__class__ = HiddenStatesOutput


def output_matrix(model: Any) -> Tensor:
    """[rows of this rank's part of the padded vocabulary, D], on the last pipeline stage; the embedding where
    it is tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight
