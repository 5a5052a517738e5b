"""The stages of a step, each a function from records to records. `loop.py` shows them in order.

Every rank calls every stage alike. Ranks share the prompts of a step; after `respond` all ranks know all
samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megagspo.algo.advantages import group_advantages
from megagspo.algo.aggregation import AGGREGATIONS
from megagspo.algo.objective import Objective
from megagspo.assembly import Respondent
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.errors import DataError, NumericsError
from megagspo.rollout.collect import build_requests, group_id
from megagspo.types import Completion, Prompt, Sample, TrainSequence

if TYPE_CHECKING:
    from megagspo.policy.policy import MegatronPolicy, MiniBatch


# --- rollouts and rewards -----------------------------------------------------------------------------------


def respond(
    parts: Respondent,
    prompts: Sequence[Prompt],
    *,
    responses: int,
    step: int,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Consumes prompts, produces `responses` scored samples of each, in their order, on every rank.

    Each rank answers its share, whole groups so that a prompt is read once. A sample depends on (run seed,
    step, prompt, index) alone, whatever the share, up to rounding of logits in another batch. progress is
    told how many of this rank's responses ended since it was last told.
    """
    requests = build_requests(
        prompts, responses=responses, sampling=parts.sampling, run_seed=parts.seed, step=step
    )
    rank, ranks = _place()
    mine = [
        (position, prompt, requests[position * responses : (position + 1) * responses])
        for position, prompt in enumerate(prompts)
        if position % ranks == rank
    ]
    asked = [request for _, _, group in mine for request in group]
    completions = iter(parts.engine.generate(asked, progress))
    answered = [(position, prompt, [next(completions) for _ in group]) for position, prompt, group in mine]
    return _in_order(_score(parts, answered, step))


def _score(
    parts: Respondent, answered: Sequence[tuple[int, Prompt, list[Completion]]], step: int
) -> list[tuple[int, list[Sample]]]:
    flat = [(prompt, completion) for _, prompt, group in answered for completion in group]
    texts = [parts.tokenizer.decode(c.token_ids, skip_special_tokens=True) for _, c in flat]
    scores = iter(zip(texts, parts.scorer.score([prompt for prompt, _ in flat], texts), strict=True))
    scored = []
    for position, prompt, group in answered:
        samples = []
        for completion in group:
            text, rewards = next(scores)
            samples.append(
                Sample(
                    id=completion.request_id,
                    group=group_id(prompt, step=step, position=position),
                    prompt=prompt,
                    completion=completion,
                    text=text,
                    reward=parts.scorer.total(rewards),
                    rewards=rewards,
                )
            )
        scored.append((position, samples))
    return scored


def _in_order(mine: list[tuple[int, list[Sample]]]) -> list[Sample]:
    """All ranks' groups, by position, on every rank."""
    shares = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        shares = [mine] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
    return [
        sample
        for _, group in sorted((g for share in shares for g in share), key=lambda g: g[0])
        for sample in group
    ]


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# --- what is learned from -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The samples a step learns from; the lists run parallel. Log-probabilities are [response tokens] float32
    each.

    old_logprobs is what ratios are taken against; trainer_logprobs is None when `algorithm.old_logprobs:
    rollout` spares the trainer's own pass.
    """

    samples: Sequence[Sample]
    sequences: Sequence[TrainSequence]
    advantages: Sequence[float]
    rollout_logprobs: Sequence[Tensor]
    old_logprobs: Sequence[Tensor]
    trainer_logprobs: Sequence[Tensor] | None


def experience(config: AlgorithmConfig, samples: Sequence[Sample]) -> Experience:
    """Leaves out what is not trainable, and computes advantages group by group from the rest."""
    kept = [sample for sample in samples if sample.trainable]
    if not kept:
        raise DataError("no response of this step can be learned from: every one was aborted or is empty")
    rollout = [torch.tensor(sample.completion.logprobs, dtype=torch.float32) for sample in kept]
    settings = config.advantage
    return Experience(
        samples=kept,
        sequences=[_sequence(sample) for sample in kept],
        advantages=group_advantages(
            [sample.reward for sample in kept],
            [sample.group for sample in kept],
            baseline=settings.baseline,
            scale=settings.scale,
            ddof=settings.ddof,
            eps=settings.eps,
        ),
        rollout_logprobs=rollout,
        old_logprobs=rollout,
        trainer_logprobs=None,
    )


def recompute_old_logprobs(policy: MegatronPolicy, data: Experience, *, temperature: float) -> Experience:
    """The trainer's own log-probabilities of all samples before any update, in as few passes as the tokens of
    a micro-batch allow."""
    trainer = policy.logprobs(data.sequences, temperature=temperature).logprobs
    _check_finite(data.samples, trainer)
    return replace(data, old_logprobs=trainer, trainer_logprobs=trainer)


def divide(count: int, parts: int, *, seed: int, step: int) -> list[list[int]]:
    """The positions of `count` samples in random order (by run seed and step), in `parts` mini-batches of
    like size."""
    order = list(range(count))
    random.Random(f"{seed}/{step}/mini-batches").shuffle(order)
    return [chunk for part in range(parts) if (chunk := order[part::parts])]


def mini_batch(config: AlgorithmConfig, data: Experience, members: Sequence[int]) -> MiniBatch:
    """What one optimizer update learns from. The token weights hold every normalisation, over the whole
    mini-batch."""
    from megagspo.policy.policy import MiniBatch

    sequences = [data.sequences[i] for i in members]
    weights = AGGREGATIONS[config.aggregation]([sequence.response_length for sequence in sequences])
    return MiniBatch(
        sequences=sequences,
        old_logprobs=[data.old_logprobs[i] for i in members],
        advantages=[data.advantages[i] for i in members],
        token_weights=weights,
    )


def supervised_batch(prompts: Sequence[Prompt], answers: Sequence[tuple[int, ...]]) -> MiniBatch:
    """The reference answers as responses, all tokens alike."""
    from megagspo.policy.policy import MiniBatch

    sequences = [
        TrainSequence(id=prompt.id, token_ids=prompt.token_ids + answer, prompt_length=len(prompt.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return MiniBatch(
        sequences=sequences,
        old_logprobs=[torch.zeros(sequence.response_length) for sequence in sequences],
        advantages=[1.0] * len(sequences),
        token_weights=AGGREGATIONS["token_mean"]([sequence.response_length for sequence in sequences]),
    )


# --- updates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer update: sums over its response tokens (see `MegatronPolicy.forward_backward`)."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


def update(policy: MegatronPolicy, batch: MiniBatch, objective: Objective, *, temperature: float) -> Update:
    """One gradient and one optimizer step. Raises NumericsError, before any weight moves, when the loss is
    not finite."""
    sums = policy.forward_backward(batch, objective, temperature=temperature)
    if not math.isfinite(sums["loss"]):
        raise NumericsError(
            f"the loss of update {policy.updates + 1} is {sums['loss']}: "
            "it was not made, and the last checkpoint stands"
        )
    grad_norm, learning_rate = policy.optimizer_step()
    if not math.isfinite(grad_norm):
        raise NumericsError(
            f"the gradient norm of update {policy.updates} is {grad_norm}: the weights in memory are "
            "spoiled, the last checkpoint stands"
        )
    return Update(sums=sums, grad_norm=grad_norm, learning_rate=learning_rate)


def _sequence(sample: Sample) -> TrainSequence:
    """Token ids are the truth: the engine's own, never made again from text."""
    prompt, response = sample.prompt.token_ids, sample.completion.token_ids
    return TrainSequence(id=sample.id, token_ids=prompt + response, prompt_length=len(prompt))


def _check_finite(samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> None:
    for sample, values in zip(samples, logprobs, strict=True):
        if not torch.isfinite(values).all():
            raise NumericsError(
                f"sample {sample.id}: the trainer's log-probabilities are not finite: {values.tolist()}"
            )
