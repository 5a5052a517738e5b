"""Mathematical equality with the reference answer, judged by math-verify in worker processes.

Which part of a response is its answer is decided here, by one rule for responses and references alike
(`answer_of`); math-verify only compares. Left to itself it glues boxes together in some versions, takes the
last number of a list for the whole list, and bounds its time by signals, which work in main threads alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from megagspo.reward.base import AnswerReward, reference_answer
from megagspo.reward.workers import WorkerPool
from megagspo.types import Prompt

logger = logging.getLogger(__name__)

# The middle alternative passes over \{ and \}, which are printed braces and group nothing.
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(r"####(.*)")
_PHRASE = re.compile(r"(?i)\banswer(?: is|\s*[:=])")


class MathReward(AnswerReward):
    """1.0 when the response's answer equals the reference as mathematics, sets without order; otherwise 0.0.

    A response without an answer, with one that cannot be parsed, or on which the comparison takes longer than
    `time_limit` processor seconds, gets 0.0; the reason is logged.
    """

    def __init__(self, *, workers: int | None = None, time_limit: float = 5.0) -> None:
        self._pool = WorkerPool("megagspo.reward.math_judge:judge", workers=workers, time_limit=time_limit)

    @classmethod
    def check(cls, prompt: Prompt) -> None:
        reference_answer(prompt, reward="math")

    def answer(self, text: str) -> str | None:
        return answer_of(text)

    def score(self, prompt: Prompt, text: str) -> float:
        return self.score_all([prompt], [text])[0]

    def score_all(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        scores = [0.0] * len(texts)
        asked: list[int] = []
        questions: list[dict[str, Any]] = []
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            reference = answer_of(reference_answer(prompt, reward="math"))
            answer = answer_of(text)
            if answer and answer == reference:
                scores[index] = 1.0
            elif answer and reference:
                asked.append(index)
                questions.append({"answer": answer, "reference": reference})
        for index, verdict in zip(asked, self._pool.run(questions), strict=True):
            if verdict.reason is not None:
                logger.warning(
                    "math: a response to prompt %s counts 0: %s", prompts[index].id, verdict.reason
                )
            scores[index] = float(verdict.score or 0.0)
        return scores

    def close(self) -> None:
        self._pool.close()


def answer_of(text: str) -> str | None:
    r"""The part of a response (or of a reference solution) that is its answer; None where there is none.

    In this order: what the last closed \boxed{...} holds; what follows the last `####`, on its line; on the
    last line, what follows the last "answer is" or "answer:", or the whole line.
    """
    box = _last_box(text)
    if box is not None:
        return box.strip() or None
    marked = _MARKER.findall(text)
    if marked:
        return marked[-1].strip() or None
    lines = text.strip().splitlines()
    if not lines:
        return None
    return _PHRASE.split(lines[-1])[-1].strip().removesuffix(".").strip() or None


def _last_box(text: str) -> str | None:
    """What the last box with a closing brace holds. A box cut off by the length limit holds no answer.

    One pass, whatever the nesting: a response of nothing but opened boxes must not hold the scorer up.
    """
    opened: list[int] = []  # where each open group's content starts; -1 for a group that is no box
    last = (-1, -1)
    for brace in _BRACE.finditer(text):
        if brace["box"]:
            opened.append(brace.end())
        elif brace[0] == "{":
            opened.append(-1)
        elif brace[0] == "}" and opened:
            last = max(last, (opened.pop(), brace.start()))
    return None if last[0] < 0 else text[slice(*last)]
