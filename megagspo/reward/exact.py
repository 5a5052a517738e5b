"""The response is the reference answer, but for white space around it."""

from __future__ import annotations

from megagspo.reward.base import AnswerReward, reference_answer
from megagspo.types import Prompt


class ExactReward(AnswerReward):
    """1.0 when the stripped response equals the stripped reference answer, otherwise 0.0."""

    @classmethod
    def check(cls, prompt: Prompt) -> None:
        reference_answer(prompt, reward="exact")

    def answer(self, text: str) -> str | None:
        return text.strip() or None

    def score(self, prompt: Prompt, text: str) -> float:
        return float(text.strip() == reference_answer(prompt, reward="exact").strip())
