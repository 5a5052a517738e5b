"""Responses for tests of objectives, and what an objective gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megagspo.algo.aggregation import token_weights
from megagspo.algo.losses import objective_of
from megagspo.algo.objective import Objective, Terms, TokenBatch
from megagspo.algo.segments import Segments
from megagspo.config.algorithm import AlgorithmConfig, AlgorithmName
from tests.conformance import papers

LENGTHS = [1, 2, 8, 5, 13, 3]
ADVANTAGES = [1.5, -0.5, 0.7, -2.0, 0.3, -1.0]
NAMES: tuple[AlgorithmName, ...] = (
    "gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "rloo", "reinforce_pp", "hybrid"
)  # fmt: skip
SEQUENCE_RATIOS = ("gspo", "gspo_token")

Rows = list[Tensor]


def settings(name: AlgorithmName, **keys: object) -> AlgorithmConfig:
    """A configuration in which what a run would fill in is there; hybrid leans to one side."""
    filled: dict[str, Any] = {"dr_grpo": {"length_constant": 16}, "hybrid": {"hybrid_weight": 0.3}}
    return AlgorithmConfig.model_validate({"name": name, **filled.get(name, {}), **keys})


def random_rows(scale: float, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> tuple[Rows, Rows]:
    """Log-probabilities now and before, `scale` apart: float32 numbers, so that what float64 computes from
    them has the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    train = [torch.randn(length, generator=generator) - 3 for length in lengths]
    return train, [row - scale * torch.randn(len(row), generator=generator) for row in train]


def make_batch(
    train: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Sequence[float | Sequence[float]],
    *,
    dtype: torch.dtype = torch.float32,
    **more: Sequence[Tensor] | None,
) -> TokenBatch:
    """more: further rows of the batch, such as ref_logprobs."""
    spread = [
        torch.full((len(row),), value, dtype=dtype)
        if isinstance(value, int | float)
        else torch.tensor(value, dtype=dtype)
        for value, row in zip(advantages, train, strict=True)
    ]
    rest = {name: torch.cat(list(rows)).to(dtype) for name, rows in more.items() if rows is not None}
    return TokenBatch(
        train_logprobs=torch.cat(list(train)).detach().to(dtype).requires_grad_(),
        old_logprobs=torch.cat(list(old)).to(dtype),
        advantages=torch.cat(spread),
        segments=Segments.of([len(row) for row in train]),
        **rest,
    )


def loss_and_gradient(
    batch: TokenBatch, config: AlgorithmConfig, objective: Objective | None = None
) -> tuple[float, Tensor, Terms]:
    """The loss as the learner takes it, sum over tokens of weight x term, and its gradient."""
    terms = (objective or objective_of(config))(batch)
    weights = token_weights(
        batch.segments.lengths.int().tolist(), config.aggregation, length_constant=config.length_constant
    )
    spread = batch.segments.spread(torch.tensor(weights, dtype=terms.loss.dtype))
    loss = (spread * terms.loss).sum()
    (gradient,) = torch.autograd.grad(loss, batch.train_logprobs)
    return loss.item(), gradient, terms


def transcribed(
    config: AlgorithmConfig,
    train: Rows,
    old: Rows,
    advantages: Sequence[float | Sequence[float]],
    **more: Rows,
) -> tuple[float, list[float], list[bool]]:
    """Loss, gradient and clipped tokens by the papers' formulas, in float64, laid end to end."""
    samples = []
    for i, row in enumerate(train):
        given = advantages[i]
        samples.append(
            {
                "group": i,
                "reward": 0.0,
                "mask": [1] * len(row),
                "train_logprobs": row.double().tolist(),
                "old_logprobs": old[i].double().tolist(),
                "token_advantages": [given] * len(row) if isinstance(given, int | float) else list(given),
                **{name: rows[i].double().tolist() for name, rows in more.items()},
            }
        )
    stated = {key: value for key, value in config.model_dump().items() if value is not None}
    if stated["off_policy_mask"]["threshold"] is None:
        del stated["off_policy_mask"]
    result = papers.evaluate(stated, samples)
    flat = [g for row in result["gradients"] for g in row]
    return result["loss"], flat, [c for row in result["clipped"] for c in row]


def sides(terms: Terms) -> list[int]:
    """1 where a token is clipped above the range, -1 below it."""
    return (terms.clipped_high.int() - terms.clipped_low.int()).tolist()
