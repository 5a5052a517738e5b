"""Prompts to scored samples: the rollout of a step, shared by the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megagspo.assembly import Respondent
from megagspo.config import Config
from megagspo.data import PromptStream
from megagspo.errors import DataError
from megagspo.rollout.collect import build_requests, group_id
from megagspo.types import Completion, Prompt, Sample


def explore(config: Config, parts: Respondent, stream: PromptStream, *, step: int) -> list[Sample]:
    """The samples of a step: `rollout.prompts` groups, with dynamic sampling only such whose rewards vary."""
    rollout = config.rollout
    prompts = stream.take(rollout.prompts)
    samples = respond(parts, prompts, responses=rollout.responses, step=step)
    if config.algorithm.dynamic_sampling:
        samples = varied_groups(
            parts, stream, samples, groups=rollout.prompts, responses=rollout.responses, step=step
        )
    return samples


def respond(
    parts: Respondent,
    prompts: Sequence[Prompt],
    *,
    responses: int,
    step: int,
    first_position: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Consumes prompts, produces `responses` scored samples of each, in their order, on every rank.
    first_position: how many prompts the step has answered before; progress is told how many of this rank's
    responses ended since it was last told.

    Each rank answers its share, whole groups so that a prompt is read once. A sample depends on (run seed,
    step, prompt, index) alone, whatever the share, up to rounding of logits in another batch.
    """
    requests = build_requests(
        prompts,
        responses=responses,
        sampling=parts.sampling,
        run_seed=parts.seed,
        step=step,
        first_position=first_position,
    )
    rank, ranks = _place()
    mine = [
        (first_position + i, prompt, requests[i * responses : (i + 1) * responses])
        for i, prompt in enumerate(prompts)
        if i % ranks == rank
    ]
    asked = [request for _, _, group in mine for request in group]
    completions = iter(parts.engine.generate(asked, progress))
    answered = [(position, prompt, [next(completions) for _ in group]) for position, prompt, group in mine]
    return _in_order(_score(parts, answered, step))


MOST_ROUNDS = 10
"""Dynamic sampling goes on with the groups it has after so many rounds, the step's first prompts included."""


def varied_groups(
    parts: Respondent, stream: PromptStream, samples: list[Sample], *, groups: int, responses: int, step: int
) -> list[Sample]:
    """Dynamic sampling (arXiv 2503.14476, section 3.2): replaces groups whose rewards are all equal by groups
    of further prompts, until there are `groups` of them or MOST_ROUNDS is reached. In order of drawing.

    Raises DataError when no group at all has rewards that differ.
    """
    kept, drawn = _varied(samples), groups
    for _ in range(MOST_ROUNDS - 1):
        missing = groups - len(kept)
        if missing <= 0:
            break
        prompts = stream.take(missing)
        further = respond(parts, prompts, responses=responses, step=step, first_position=drawn)
        drawn += missing
        kept += _varied(further)
    if not kept:
        raise DataError(
            f"algorithm.dynamic_sampling found no group of step {step} whose rewards differ, in {drawn} "
            "prompts: the task is too hard or too easy for the model, or the reward never varies"
        )
    return [sample for group in kept for sample in group]


def _varied(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The groups whose trainable samples have rewards that differ, in order. NaN differs from everything."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    rewards = {group: [s.reward for s in members if s.trainable] for group, members in groups.items()}
    return [
        members
        for group, members in groups.items()
        if any(reward != rewards[group][0] for reward in rewards[group])
    ]


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
