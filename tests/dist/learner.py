"""What the test bodies share: a policy for a layout, a batch for it, and its gradients and weights as
Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.schema import Config, Layout
from megagspo.platform.device import Platform
from megagspo.types import MiniBatch, TrainSequence
from tests.dist.models import make_sequences


def make_config(path: Path, /, **sections: dict[str, Any]) -> Config:
    given: dict[str, Any] = {"model": {}, **sections}
    given["model"] = {"path": str(path), **given["model"]}
    return Config.model_validate({"data": {"train": [{"reasoning_gym": "chain_sum"}]}, **given})


def make_policy(
    layout: Layout, platform: Platform, path: Path, /, *, total_updates: int = 10, **sections: Any
) -> Any:
    from megagspo.policy.policy import MegatronPolicy

    return MegatronPolicy(make_config(path, **sections), layout, platform, total_updates=total_updates)


def make_batch(sequences: list[TrainSequence], seed: int = 0) -> Any:
    """A mini-batch with advantages of both signs and old log-probabilities that put ratios inside and
    outside of any range.

    Token weights are those of a mean over each response, then over responses. Groups have 1, 2, 3, ...
    members, and all of one group's responses share one advantage."""
    generator = torch.Generator().manual_seed(seed)
    advantages: list[float] = []
    while len(advantages) < len(sequences):
        value = float(torch.randn((), generator=generator))
        advantages += [value] * (1 + len(advantages) % 3)
    # About the log-probabilities under uniform predictions, moved for each response so that its ratio
    # leaves the range or not.
    old = [
        torch.randn(s.loss_tokens, generator=generator) + 3 * torch.randn((), generator=generator) - 6.0
        for s in sequences
    ]
    weights = [1 / (len(sequences) * sequence.loss_tokens) for sequence in sequences]
    return MiniBatch(
        sequences=sequences,
        old_logprobs=old,
        advantages=[torch.full((len(o),), a) for o, a in zip(old, advantages, strict=False)],
        token_weights=weights,
    )


def make_objective() -> Any:
    """GSPO with a range so wide that about half of the responses of `make_batch` are inside it."""
    from megagspo.algo.losses import objective_of

    return objective_of(AlgorithmConfig(name="gspo", clip_low=0.8, clip_high=2.0))


def weights_of(policy: Any) -> dict[str, Tensor]:
    """The policy's weights in Hugging Face layout."""
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def gradients_of(policy: Any) -> dict[str, Tensor]:
    """The gradient of every Hugging Face tensor: the gradient buffers take the weights' way out.

    The distributed optimizer leaves each data-parallel rank the sum of its own part of a buffer alone, so
    the parts are put together first."""
    for buffer in [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]:
        group = buffer.data_parallel_group
        if policy.config.trainer.distributed_optimizer and group.size() > 1:
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(group.size()))
                own = parts[group.rank()].clone()
                dist.all_gather(parts, own, group=group)
    return {name: tensor.clone() for name, tensor in _exported(policy, lambda p: p.main_grad).items()}


def _exported(policy: Any, of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    weights = policy.weights
    parameters = weights._local
    try:
        weights._local = {name: of(parameter) for name, parameter in parameters.items()}
        return dict(weights.stream(1 << 20))
    finally:
        weights._local = parameters


def update(policy: Any, *, seed: int) -> dict[str, float]:
    """One optimizer update on a batch of its own; returns its loss, the gradient norm and the learning
    rate."""
    batch = make_batch(make_sequences(9, seed=seed), seed)
    gradient = policy.forward_backward(batch, make_objective(), temperature=1.0)
    norm, rate = policy.optimizer_step()
    return {"loss": gradient.loss, "norm": norm, "lr": rate}
