"""Root-mean-square norm that may run under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, arXiv 1910.07467).

    Megatron's wrapper of the torch norm refuses sequence parallelism. All that is missing is the mark on the
    weight by which Megatron sums its gradient over the tensor-parallel ranks, each of which saw a part of the
    sequence only.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not a field of Parameter
