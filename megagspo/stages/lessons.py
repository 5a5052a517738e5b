"""Samples to what the optimizer updates of a step learn from."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megagspo.algo.aggregation import token_weights
from megagspo.algo.shaping import overlong_punishment
from megagspo.algo.signal import Responses, response_advantages, response_corrections
from megagspo.config import Config
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.errors import DataError, NumericsError
from megagspo.types import MiniBatch, Prompt, Sample, TrainSequence

if TYPE_CHECKING:
    from megagspo.policy.policy import MegatronPolicy


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The samples a step learns from; the lists run parallel, log-probabilities are [loss tokens] float32
    each.

    trainer_logprobs, ref_logprobs: of the policy and of the reference before any update; None where the
    configuration has no use for them.
    """

    samples: Sequence[Sample]
    sequences: Sequence[TrainSequence]
    rollout_logprobs: Sequence[Tensor]
    trainer_logprobs: Sequence[Tensor] | None = None
    ref_logprobs: Sequence[Tensor] | None = None


def experience(samples: Sequence[Sample]) -> Experience:
    """Leaves out what is not trainable."""
    kept = [sample for sample in samples if sample.trainable]
    if not kept:
        raise DataError("no response of this step can be learned from: every one was aborted or is empty")
    return Experience(
        samples=kept,
        sequences=[_sequence(sample) for sample in kept],
        rollout_logprobs=[torch.tensor(sample.completion.logprobs, dtype=torch.float32) for sample in kept],
    )


def score_before_updates(
    policy: MegatronPolicy, data: Experience, config: AlgorithmConfig, *, temperature: float
) -> Experience:
    """Adds the log-probabilities of the trainer and of the reference where the configuration asks for
    them."""
    trainer = reference = None
    if config.needs_trainer_pass:
        trainer = policy.logprobs(data.sequences, temperature=temperature).logprobs
        _check_finite(data.samples, trainer, "trainer")
    if config.needs_reference:
        reference = policy.ref_logprobs(data.sequences, temperature=temperature)
        _check_finite(data.samples, reference, "reference")
    return replace(data, trainer_logprobs=trainer, ref_logprobs=reference)


def lesson(config: Config, data: Experience) -> MiniBatch:
    """What the whole step teaches: advantages, corrections, and what ratios are taken against.

    Its token weights are those of one update from everything; `mini_batch` makes those of a part.
    """
    algorithm = config.algorithm
    old = data.rollout_logprobs if algorithm.old_logprobs == "rollout" else data.trainer_logprobs
    assert old is not None
    for sample in data.samples:
        if not math.isfinite(sample.reward):
            raise NumericsError(f"sample {sample.id}: its reward is {sample.reward}", sample=sample.id)
    rewards = [
        sample.reward
        - overlong_punishment(
            len(sample.completion.token_ids), config.rollout.response_length_max, algorithm.overlong
        )
        for sample in data.samples
    ]
    responses = Responses(
        rewards=rewards,
        groups=[sample.group for sample in data.samples],
        old_logprobs=old,
        trainer_logprobs=data.trainer_logprobs,
        rollout_logprobs=data.rollout_logprobs,
        ref_logprobs=data.ref_logprobs,
    )
    return MiniBatch(
        sequences=data.sequences,
        token_weights=_weights(config, data.sequences),
        advantages=[values.float() for values in response_advantages(responses, algorithm)],
        old_logprobs=old,
        rollout_logprobs=data.rollout_logprobs,
        ref_logprobs=data.ref_logprobs,
        corrections=response_corrections(responses, algorithm),
    )


def divide(count: int, parts: int, *, seed: int, step: int, epoch: int = 0) -> list[list[int]]:
    """The positions of `count` samples in random order (by run seed, step and epoch), in `parts` mini-batches
    of like size."""
    order = list(range(count))
    random.Random(f"{seed}/{step}/mini-batches" + (f"/{epoch}" if epoch else "")).shuffle(order)
    return [chunk for part in range(parts) if (chunk := order[part::parts])]


def divisions(config: Config, count: int, *, step: int) -> Iterator[list[int]]:
    """The members of every mini-batch of a step: `trainer.epochs` passes over all samples, divided anew each
    time."""
    for epoch in range(config.trainer.epochs):
        yield from divide(count, config.trainer.minibatches, seed=config.run.seed, step=step, epoch=epoch)


def mini_batch(config: Config, whole: MiniBatch, members: Sequence[int]) -> MiniBatch:
    """The part of a lesson that one optimizer update learns from. Its token weights hold every normalisation,
    over the whole mini-batch."""

    def of(values: Sequence[Any] | None) -> Any:
        return None if values is None else [values[i] for i in members]

    sequences = of(whole.sequences)
    return MiniBatch(
        sequences=sequences,
        token_weights=_weights(config, sequences),
        advantages=of(whole.advantages),
        old_logprobs=of(whole.old_logprobs),
        rollout_logprobs=of(whole.rollout_logprobs),
        ref_logprobs=of(whole.ref_logprobs),
        corrections=of(whole.corrections),
    )


def _weights(config: Config, sequences: Sequence[TrainSequence]) -> list[float]:
    algorithm = config.algorithm
    return token_weights(
        [sequence.loss_tokens for sequence in sequences],
        algorithm.aggregation,
        length_constant=algorithm.length_constant or config.rollout.response_length_max,
    )


def supervised_batch(prompts: Sequence[Prompt], answers: Sequence[tuple[int, ...]]) -> MiniBatch:
    """The reference answers as responses, all tokens alike."""
    sequences = [
        TrainSequence(id=prompt.id, token_ids=prompt.token_ids + answer, prompt_length=len(prompt.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    lengths = [sequence.loss_tokens for sequence in sequences]
    return MiniBatch(
        sequences=sequences,
        token_weights=token_weights(lengths, "token_mean"),
        advantages=[torch.ones(length) for length in lengths],
        old_logprobs=[torch.zeros(length) for length in lengths],
    )


def _sequence(sample: Sample) -> TrainSequence:
    """Token ids are the truth: the engine's own, never made again from text."""
    prompt, response = sample.prompt.token_ids, sample.completion.token_ids
    return TrainSequence(id=sample.id, token_ids=prompt + response, prompt_length=len(prompt))


def _check_finite(samples: Sequence[Sample], logprobs: Sequence[Tensor], whose: str) -> None:
    for sample, values in zip(samples, logprobs, strict=True):
        if not torch.isfinite(values).all():
            raise NumericsError(
                f"sample {sample.id}: the {whose}'s log-probabilities are not finite: {values.tolist()}",
                sample=sample.id,
            )
