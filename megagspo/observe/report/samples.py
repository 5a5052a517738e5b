"""Sample answers from the saved rollouts: a few right and wrong ones of the first and of the last step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagspo.observe.report.text import printable

ANSWERS = 3  # of each kind, each to another prompt
CHARACTERS = 6000  # of one prompt or answer; the rest is counted


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response, ready to be shown. expected: the reference answer, None where the source has none."""

    prompt: str
    text: str
    expected: str | None
    reward: float
    tokens: int
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class StepAnswers:
    """Answers of one step. An answer is right when it reaches every positive reward in full."""

    step: int
    responses: int
    responses_right: int
    right: tuple[Answer, ...]
    wrong: tuple[Answer, ...]


def full_reward(config: Mapping[str, Any]) -> float:
    """What a response gets that reaches every positive reward in full, less a hair for rounding: as
    `measure.full_reward`, from a configuration that has not been validated."""
    return sum(max(float(entry.get("weight", 1.0)), 0.0) for entry in config.get("reward") or ()) - 1e-9


def sample_answers(rollouts: Path, *, full: float) -> tuple[list[StepAnswers], list[str]]:
    """Answers of the first and of the last step in a directory of saved rollouts, and what could not be read.
    Chosen by their place in the files, so always the same."""
    files = sorted(rollouts.glob("step_*.jsonl"))
    steps, notes = [], []
    for file in dict.fromkeys((*files[:1], *files[-1:])):
        try:
            steps.append(_step_answers(file, full=full))
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"rollouts/{file.name} cannot be read and is left out ({error}).")
    return steps, notes


def _step_answers(file: Path, *, full: float) -> StepAnswers:
    chosen: dict[bool, dict[str, Answer]] = {True: {}, False: {}}
    counts = {True: 0, False: 0}
    step = 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            step = int(sample["step"])
            right = float(sample["reward"]) >= full
            counts[right] += 1
            group = str(sample["group"])
            if len(chosen[right]) < ANSWERS and group not in chosen[right]:
                chosen[right][group] = _answer(sample)
    return StepAnswers(
        step=step,
        responses=sum(counts.values()),
        responses_right=counts[True],
        right=tuple(chosen[True].values()),
        wrong=tuple(chosen[False].values()),
    )


def _answer(sample: Mapping[str, Any]) -> Answer:
    prompt, completion = sample["prompt"], sample["completion"]
    expected = prompt.get("answer")
    return Answer(
        prompt=_shortened(prompt["text"].strip()),
        text=_shortened(sample["text"]),
        expected=None if expected is None else _shortened(str(expected)),
        reward=float(sample["reward"]),
        tokens=len(completion["token_ids"]),
        truncated=completion["finish_reason"] == "length",
    )


def _shortened(text: str) -> str:
    rest = len(text) - CHARACTERS
    return printable(text if rest <= 0 else f"{text[:CHARACTERS]}\n[{rest} more characters]")
