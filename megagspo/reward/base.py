"""What a reward is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megagspo.errors import DataError
from megagspo.types import Prompt


class Reward(ABC):
    """Judges responses. Usable from any thread; `close` gives back whatever it holds."""

    @classmethod  # noqa: B027  # some rewards can judge whatever a prompt holds
    def check(cls, prompt: Prompt) -> None:
        """Raises DataError for a prompt whose responses cannot be judged. Asked of every prompt before a
        run starts."""

    @abstractmethod
    def score(self, prompt: Prompt, text: str) -> float:
        """The reward of one response, decoded without special tokens; a finite number, usually 0 to 1."""

    def score_all(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """One reward a response, in order. Overridden where responses can be judged at the same time."""
        return [self.score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def close(self) -> None:  # noqa: B027  # most rewards hold nothing
        """Ends worker processes and the like."""


class AnswerReward(Reward):
    """Judges one part of a response alone, its answer: for one prompt, equal answers get equal rewards, 1.0
    when they are right. So responses can be counted as votes (maj@k)."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """The part of the response that is its answer; None where there is none."""


def reference_answer(prompt: Prompt, *, reward: str) -> str:
    """The prompt's reference answer; DataError for a prompt that has none, which cannot be judged so."""
    if prompt.answer is None:
        raise DataError(
            f"prompt {prompt.id} has no reference answer, which the reward {reward!r} compares with: "
            f"give source {prompt.source!r} an answer field, or use another reward"
        )
    return prompt.answer
