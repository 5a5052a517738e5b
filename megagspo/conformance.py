"""The objectives against vectors: small JSON files of inputs and right results that any project can read.

The schema is documented in `tests/conformance/README.md`. Everything is computed in float64 from the
log-probabilities of the file, on the very functions that training uses; no model is involved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from megagspo.algo.aggregation import token_weights
from megagspo.algo.losses import objective_of
from megagspo.algo.objective import TokenBatch
from megagspo.algo.segments import Segments
from megagspo.algo.signal import Responses, response_advantages, response_corrections
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.guard import check_token_advantages, guard
from megagspo.config.messages import describe
from megagspo.config.section import Section
from megagspo.errors import ConfigError, DataError, MegagspoError

Numbers = list[float]


class _Entry(Section):
    """NaN is allowed: what becomes of it is something to conform about."""

    model_config = ConfigDict(allow_inf_nan=True)


class VectorSample(_Entry):
    """One response. mask: 1 where a token is the model's own and learned from; all lists are that long."""

    group: str | int
    reward: float
    mask: list[Annotated[int, Field(ge=0, le=1)] | bool]
    train_logprobs: Numbers
    old_logprobs: Numbers
    rollout_logprobs: Numbers | None = None
    ref_logprobs: Numbers | None = None
    token_advantages: Numbers | None = None

    @model_validator(mode="after")
    def _lengths(self) -> VectorSample:
        for name in (
            "train_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "token_advantages"
        ):  # fmt: skip
            values = getattr(self, name)
            if values is not None and len(values) != len(self.mask):
                raise ValueError(f"{name} has {len(values)} entries, mask {len(self.mask)}")
        return self


class Vector(_Entry):
    """One entry of a file of vectors. note: for people."""

    name: str
    note: str = ""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    samples: list[VectorSample]
    expect: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the objective gives for a vector. advantages: one number a sample, or a list where they differ
    over its tokens; gradients: d loss / d train_logprobs; both 0, and clipped false, where the mask is 0."""

    loss: float
    advantages: list[float | list[float]]
    gradients: list[list[float]]
    clipped: list[list[bool]]


def read_vectors(file: Path) -> list[Vector]:
    """The entries of a file. Raises DataError naming the entry and the field that is wrong."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list):
        raise DataError(f"{file} holds no list: a file of vectors is a list of objects, one a case")
    vectors = []
    for position, entry in enumerate(entries):
        try:
            vectors.append(Vector.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (position, *first["loc"])))
            raise DataError(f"{file}, entry {place}: {first['msg']}") from error
    return vectors


def evaluate(vector: Vector) -> Outcome:
    """Loss, advantages, gradients and clipped tokens. Raises ConfigError where the configuration is
    refused."""
    config = _algorithm(vector)
    kept = [sample for sample in vector.samples if any(sample.mask)]  # the rest counts nowhere
    if not kept:
        raise DataError(f"{vector.name}: no sample has a token to learn from")
    train = [_trainable(sample, sample.train_logprobs).requires_grad_() for sample in kept]
    responses = _responses(kept, config)
    lengths = [len(values) for values in train]
    weights = token_weights(lengths, config.aggregation, length_constant=config.length_constant)
    advantages = response_advantages(responses, config)
    corrections = response_corrections(responses, config)
    segments = Segments.of(lengths)
    terms = objective_of(config)(
        TokenBatch(
            train_logprobs=torch.cat(train),
            old_logprobs=torch.cat(list(responses.old_logprobs)),
            advantages=torch.cat(advantages),
            segments=segments,
            rollout_logprobs=_joined(responses.rollout_logprobs),
            ref_logprobs=_joined(responses.ref_logprobs),
            corrections=_joined(corrections),
        )
    )
    loss = (segments.spread(torch.tensor(weights, dtype=torch.float64)) * terms.loss).sum()
    gradients = torch.autograd.grad(loss, train)
    clipped = (terms.clipped_low | terms.clipped_high).split(lengths)
    rows = iter(zip(advantages, gradients, clipped, strict=True))
    results = [next(rows) if any(sample.mask) else None for sample in vector.samples]
    return Outcome(
        loss=loss.item(),
        advantages=[
            0.0 if row is None else _one_or_all(sample, row[0])
            for sample, row in zip(vector.samples, results, strict=True)
        ],
        gradients=[
            _at_mask(sample, [] if row is None else row[1].tolist(), 0.0)
            for sample, row in zip(vector.samples, results, strict=True)
        ],
        clipped=[
            _at_mask(sample, [] if row is None else row[2].tolist(), False)
            for sample, row in zip(vector.samples, results, strict=True)
        ],
    )


def differences(expect: Mapping[str, Any], outcome: Outcome | str, *, tolerance: float = 1e-9) -> list[str]:
    """What of `expect` the outcome (or the message of a refusal) is not, one line each; nothing when all
    agrees. Numbers agree to the tolerance, relative to the larger of 1 and the expected size."""
    if isinstance(outcome, str):
        return [] if expect.get("refused") else [f"refused: {outcome}"]
    if expect.get("refused"):
        return ["was to be refused"]
    found = []
    for name in ("loss", "advantages", "gradients", "clipped"):
        if name in expect and not _agree(expect[name], getattr(outcome, name), tolerance):
            found.append(f"{name}: expected {expect[name]}, got {getattr(outcome, name)}")
    return found


def run_vectors(vectors: Sequence[Vector]) -> list[tuple[Vector, Outcome | str, list[str]]]:
    """Each vector, what came of it (a refusal's message is a string), and where that is not what was
    expected."""
    results = []
    for vector in vectors:
        outcome: Outcome | str
        try:
            outcome = evaluate(vector)
        except MegagspoError as error:
            outcome = str(error)
        results.append((vector, outcome, differences(vector.expect, outcome)))
    return results


def _algorithm(vector: Vector) -> AlgorithmConfig:
    try:
        config = AlgorithmConfig.model_validate(vector.algorithm)
    except ValidationError as error:
        sentences = describe(error, schema=AlgorithmConfig, places={}, default_place=vector.name)
        raise ConfigError("; ".join(sentences)) from error
    guard(config)
    if config.entropy_coefficient > 0:
        raise ConfigError(
            f"{vector.name}: algorithm.entropy_coefficient={config.entropy_coefficient:g}: the entropy is no "
            "function of the log-probabilities of the tokens drawn; leave it out of a vector"
        )
    if config.aggregation == "constant_length" and config.length_constant is None:
        raise ConfigError(
            f"{vector.name}: algorithm.aggregation=constant_length without algorithm.length_constant, which "
            "in a run is rollout.response_length_max: give it"
        )
    samples = [sample for sample in vector.samples if any(sample.mask)]
    if any(sample.token_advantages is not None for sample in samples):
        check_token_advantages(config)
    if config.needs_reference and any(sample.ref_logprobs is None for sample in samples):
        raise ConfigError(
            f"{vector.name}: algorithm.kl.coefficient={config.kl.coefficient:g} without a reference: give "
            "ref_logprobs to every sample, or set the coefficient to 0"
        )
    wanted = {
        "algorithm.old_logprobs=rollout": config.old_logprobs == "rollout",
        f"algorithm.correction.mode={config.correction.mode}": config.correction.mode != "none",
        "algorithm.off_policy_mask.threshold": config.off_policy_mask.threshold is not None,
    }
    for key, needed in wanted.items():
        if needed and any(sample.rollout_logprobs is None for sample in samples):
            raise ConfigError(f"{vector.name}: {key} without rollout_logprobs: give them to every sample")
    return config


def _responses(samples: Sequence[VectorSample], config: AlgorithmConfig) -> Responses:
    trainer = [_trainable(sample, sample.old_logprobs) for sample in samples]
    rollout, reference = (
        None
        if any(getattr(sample, name) is None for sample in samples)
        else [_trainable(sample, getattr(sample, name)) for sample in samples]
        for name in ("rollout_logprobs", "ref_logprobs")
    )
    return Responses(
        rewards=[sample.reward for sample in samples],
        groups=[str(sample.group) for sample in samples],
        old_logprobs=rollout if config.old_logprobs == "rollout" and rollout else trainer,
        trainer_logprobs=trainer,
        rollout_logprobs=rollout,
        ref_logprobs=reference,
        token_advantages=[
            None if sample.token_advantages is None else _trainable(sample, sample.token_advantages)
            for sample in samples
        ],
    )


def _trainable(sample: VectorSample, values: Numbers) -> Tensor:
    return torch.tensor([v for v, m in zip(values, sample.mask, strict=True) if m], dtype=torch.float64)


def _joined(pieces: Sequence[Tensor] | None) -> Tensor | None:
    return None if pieces is None else torch.cat(list(pieces))


def _one_or_all(sample: VectorSample, values: Tensor) -> float | list[float]:
    own: list[float] = values.tolist()
    return own[0] if len(set(own)) == 1 else _at_mask(sample, own, 0.0)


def _at_mask(sample: VectorSample, values: Sequence[Any], elsewhere: Any) -> list[Any]:
    """The values of trainable tokens at their places, `elsewhere` at the others."""
    own = iter(values)
    return [next(own) if masked else elsewhere for masked in sample.mask]


def _agree(expected: Any, actual: Any, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(
            _agree(e, a, tolerance) for e, a in zip(expected, actual, strict=True)
        )
    if isinstance(expected, list):  # one advantage stands for all tokens of a response
        return all(_agree(e, actual, tolerance) for e in expected)
    if isinstance(actual, list):
        return all(_agree(expected, a, tolerance) for a in actual)
    if isinstance(expected, bool) or isinstance(actual, bool):
        return bool(expected) == bool(actual)
    if math.isnan(expected) or math.isnan(actual):
        return math.isnan(expected) and math.isnan(actual)
    return abs(expected - actual) <= tolerance * max(1.0, abs(expected))
