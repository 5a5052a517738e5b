"""What the objectives give for a vector.

Everything is computed in float64 from the log-probabilities of the vector, by the very functions that
training uses; no model is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megagspo.algo.aggregation import token_weights
from megagspo.algo.losses import objective_of
from megagspo.algo.objective import TokenBatch
from megagspo.algo.segments import Segments
from megagspo.algo.signal import Responses, response_advantages, response_corrections
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.guard import check_token_advantages, guard
from megagspo.config.messages import describe
from megagspo.conformance.vectors import Vector, VectorSample
from megagspo.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the objective gives for a vector. advantages: one number a sample, or a list where they differ
    over its tokens; gradients: d loss / d train_logprobs; both 0, and clipped false, where the mask is 0."""

    loss: float
    advantages: list[float | list[float]]
    gradients: list[list[float]]
    clipped: list[list[bool]]


def evaluate(vector: Vector) -> Outcome:
    """Loss, advantages, gradients and clipped tokens. Raises ConfigError where the configuration is
    refused, DataError where no sample has a token to learn from."""
    config = _algorithm(vector)
    kept = [sample for sample in vector.samples if any(sample.mask)]  # the rest counts nowhere
    if not kept:
        raise DataError("no sample has a token to learn from: every mask is 0")
    train = [_trainable(sample, sample.train_logprobs).requires_grad_() for sample in kept]
    responses = _responses(kept, config)
    lengths = [len(values) for values in train]
    weights = token_weights(lengths, config.aggregation, length_constant=config.length_constant)
    advantages = response_advantages(responses, config)
    segments = Segments.of(lengths)
    terms = objective_of(config)(
        TokenBatch(
            train_logprobs=torch.cat(train),
            old_logprobs=torch.cat(list(responses.old_logprobs)),
            advantages=torch.cat(advantages),
            segments=segments,
            rollout_logprobs=_joined(responses.rollout_logprobs),
            ref_logprobs=_joined(responses.ref_logprobs),
            corrections=_joined(response_corrections(responses, config)),
        )
    )
    loss = (segments.spread(torch.tensor(weights, dtype=torch.float64)) * terms.loss).sum()
    gradients = torch.autograd.grad(loss, train)
    clipped = (terms.clipped_low | terms.clipped_high).split(lengths)
    return Outcome(
        loss=loss.item(),
        advantages=_one_or_all(vector.samples, advantages),
        gradients=_at_masks(vector.samples, gradients, 0.0),
        clipped=_at_masks(vector.samples, clipped, False),
    )


def _algorithm(vector: Vector) -> AlgorithmConfig:
    """The objective's settings, guarded as training guards them, and against what the samples lack."""
    try:
        config = AlgorithmConfig.model_validate(vector.algorithm)
    except ValidationError as error:
        sentences = describe(error, schema=AlgorithmConfig, places={}, default_place="algorithm")
        raise ConfigError("\n".join(sentences)) from error
    guard(config)
    if config.entropy_coefficient > 0:
        raise ConfigError(
            f"algorithm.entropy_coefficient={config.entropy_coefficient:g}: an entropy is no function of the "
            "log-probabilities of the tokens drawn: leave it out of a vector"
        )
    if config.aggregation == "constant_length" and config.length_constant is None:
        raise ConfigError(
            "algorithm.aggregation=constant_length without algorithm.length_constant, which in a run is "
            "rollout.response_length_max: give it"
        )
    samples = [sample for sample in vector.samples if any(sample.mask)]
    if any(sample.token_advantages is not None for sample in samples):
        check_token_advantages(config)
    if config.needs_reference and any(sample.ref_logprobs is None for sample in samples):
        raise ConfigError(
            f"algorithm.kl.coefficient={config.kl.coefficient:g} without a reference: give ref_logprobs to "
            "every sample, or set the coefficient to 0"
        )
    wanted = {
        "algorithm.old_logprobs=rollout": config.old_logprobs == "rollout",
        f"algorithm.correction.mode={config.correction.mode}": config.correction.mode != "none",
        "algorithm.off_policy_mask.threshold": config.off_policy_mask.threshold is not None,
    }
    for key, needed in wanted.items():
        if needed and any(sample.rollout_logprobs is None for sample in samples):
            raise ConfigError(f"{key} without rollout_logprobs: give them to every sample")
    return config


def _responses(samples: Sequence[VectorSample], config: AlgorithmConfig) -> Responses:
    def given(name: str) -> list[Tensor] | None:
        values = [getattr(sample, name) for sample in samples]
        if any(value is None for value in values):
            return None
        return [_trainable(sample, value) for sample, value in zip(samples, values, strict=True)]

    trainer, rollout = given("old_logprobs"), given("rollout_logprobs")
    old = rollout if config.old_logprobs == "rollout" else trainer
    assert old is not None
    return Responses(
        rewards=[sample.reward for sample in samples],
        groups=[str(sample.group) for sample in samples],
        old_logprobs=old,
        trainer_logprobs=trainer,
        rollout_logprobs=rollout,
        ref_logprobs=given("ref_logprobs"),
        token_advantages=[
            None if sample.token_advantages is None else _trainable(sample, sample.token_advantages)
            for sample in samples
        ],
    )


def _trainable(sample: VectorSample, values: Sequence[float]) -> Tensor:
    return torch.tensor([v for v, m in zip(values, sample.mask, strict=True) if m], dtype=torch.float64)


def _joined(pieces: Sequence[Tensor] | None) -> Tensor | None:
    return None if pieces is None else torch.cat(list(pieces))


def _at_masks(samples: Sequence[VectorSample], kept: Sequence[Tensor], elsewhere: Any) -> list[list[Any]]:
    """The trainable samples' values at the places of their tokens, `elsewhere` at all other places."""
    own = iter(value for values in kept for value in values.tolist())
    return [[next(own) if masked else elsewhere for masked in sample.mask] for sample in samples]


def _one_or_all(samples: Sequence[VectorSample], kept: Sequence[Tensor]) -> list[float | list[float]]:
    """One number where a response has one advantage, else one a token; 0 for a response without tokens."""
    found: list[float | list[float]] = []
    for sample, row in zip(samples, _at_masks(samples, kept, 0.0), strict=True):
        own = {value for value, masked in zip(row, sample.mask, strict=True) if masked} or {0.0}
        found.append(own.pop() if len(own) == 1 else row)
    return found
