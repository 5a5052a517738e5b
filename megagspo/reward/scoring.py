"""All rewards of a run on a batch of responses, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megagspo.config.schema import RewardConfig
from megagspo.reward.base import AnswerReward, Reward
from megagspo.reward.exact import ExactReward
from megagspo.reward.math import MathReward
from megagspo.reward.reasoning_gym import ReasoningGymReward
from megagspo.types import Prompt

REWARDS: dict[str, type[Reward]] = {
    "exact": ExactReward,
    "math": MathReward,
    "reasoning_gym": ReasoningGymReward,
}
"""Rewards by the name they have in the configuration."""


def check_prompts(entries: Sequence[RewardConfig], prompts: Iterable[Prompt]) -> None:
    """Raises DataError, naming the first prompt whose responses one of the rewards could not judge."""
    for prompt in prompts:
        for entry in entries:
            REWARDS[entry.name].check(prompt)


class Scorer:
    """The rewards of the configuration's `reward` section. Close it, or use it in a `with` statement."""

    def __init__(self, entries: Sequence[RewardConfig]) -> None:
        self._weights: dict[str, float] = {entry.name: entry.weight for entry in entries}
        self._rewards: dict[str, Reward] = {entry.name: REWARDS[entry.name]() for entry in entries}

    @property
    def voter(self) -> tuple[str, AnswerReward] | None:
        """The first of the rewards that judges an answer alone, with its name; None without one."""
        answering = ((name, r) for name, r in self._rewards.items() if isinstance(r, AnswerReward))
        return next(answering, None)

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[dict[str, float]]:
        """Each reward by name, one dictionary a response, in the order of the responses. What is not finite
        is passed on: whoever uses it can name the sample and keep it (`rollout.store.check_finite`)."""
        assert len(prompts) == len(texts), f"{len(prompts)} prompts but {len(texts)} responses"
        scores: list[dict[str, float]] = [{} for _ in texts]
        for name, reward in self._rewards.items():
            values = reward.score_all(prompts, texts)
            assert len(values) == len(texts), f"reward {name}: {len(values)} scores of {len(texts)} responses"
            for score, value in zip(scores, values, strict=True):
                score[name] = float(value)
        return scores

    def total(self, scores: Mapping[str, float]) -> float:
        """The sum of weight x reward over one response's scores: its reward."""
        return sum(self._weights[name] * score for name, score in scores.items())

    def close(self) -> None:
        """Ends the processes that rewards hold."""
        for reward in self._rewards.values():
            reward.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
