"""The score that a reasoning-gym task itself gives, 0 to 1, with partial credit where the task knows any.

Tasks' scorers raise on malformed answers, and some evaluate expressions that never end: they run in worker
processes, and whatever goes wrong there is a response that counts 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from megagspo.errors import DataError
from megagspo.reward.base import AnswerReward
from megagspo.reward.workers import Verdict, WorkerPool
from megagspo.types import Prompt

logger = logging.getLogger(__name__)


class ReasoningGymReward(AnswerReward):
    """The task's own score of what the last <answer>...</answer> holds, or of the whole response without one.

    A malformed response, one whose scoring takes longer than `time_limit` processor seconds, and a score that
    is no number all count 0.0; scores outside 0 to 1 are clamped. The reason is logged.
    """

    def __init__(self, *, workers: int | None = None, time_limit: float = 5.0) -> None:
        self._pool = WorkerPool(
            "megagspo.reward.reasoning_gym_judge:judge", workers=workers, time_limit=time_limit
        )

    @classmethod
    def check(cls, prompt: Prompt) -> None:
        _scoring(prompt)

    def answer(self, text: str) -> str | None:
        return given_answer(text) or None

    def score(self, prompt: Prompt, text: str) -> float:
        return self.score_all([prompt], [text])[0]

    def score_all(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        questions = [
            {**_scoring(prompt), "answer": prompt.answer, "text": text}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        verdicts = self._pool.run(questions)
        return [bounded(verdict, prompt=prompt) for prompt, verdict in zip(prompts, verdicts, strict=True)]

    def close(self) -> None:
        self._pool.close()


def given_answer(text: str) -> str:
    """What the last <answer>...</answer> holds, or the whole response without one, stripped: the rule of
    `reasoning_gym.utils.extract_answer`, without loading the package and in one pass over the text."""
    found, position = text, 0
    while (opened := text.find("<answer>", position)) >= 0:
        begin = opened + len("<answer>")
        end = text.find("</answer>", begin)
        if end < 0:
            break
        found, position = text[begin:end], end + len("</answer>")
    return found.strip()


def _scoring(prompt: Prompt) -> Any:
    if "reasoning_gym" not in prompt.metadata:
        raise DataError(
            f"prompt {prompt.id} is no reasoning-gym problem, which the reward 'reasoning_gym' needs: "
            "use the reward 'exact' or 'math' for sources of other kinds"
        )
    return prompt.metadata["reasoning_gym"]


def bounded(verdict: Verdict, *, prompt: Prompt) -> float:
    """The verdict as a reward from 0 to 1; what is wrong with it goes to the log."""
    if verdict.reason is not None:
        logger.info("reasoning_gym: a response to prompt %s counts 0: %s", prompt.id, verdict.reason)
        return 0.0
    score = float(verdict.score)
    if not math.isfinite(score):
        logger.warning(
            "reasoning_gym: the score of a response to prompt %s is %s: counts 0", prompt.id, score
        )
        return 0.0
    if not 0.0 <= score <= 1.0:
        logger.warning("reasoning_gym: the score of a response to prompt %s is %s: clamped", prompt.id, score)
    return min(max(score, 0.0), 1.0)
