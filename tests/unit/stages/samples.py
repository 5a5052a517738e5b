"""Scored samples for tests of stages and metrics."""

from __future__ import annotations

from megagspo.types import Completion, FinishReason, Prompt, Sample


def sample(
    number: int,
    group: str,
    reward: float,
    *,
    tokens: tuple[int, ...] = (7, 8),
    finish: FinishReason = "stop",
    logprob: float = -0.5,
) -> Sample:
    prompt = Prompt(id=f"p/{group}", source="p", text="q", token_ids=(1, 2, 3))
    completion = Completion(
        request_id=f"r{number}",
        token_ids=tokens,
        logprobs=tuple(logprob for _ in tokens),
        finish_reason=finish,
        version_min=0,
        version_max=0,
    )
    return Sample(
        id=f"r{number}", group=group, prompt=prompt, completion=completion, text="", reward=reward, rewards={}
    )
