"""All rewards of a run on a batch of responses, and their weighted sum."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence

from megagspo.config.schema import RewardConfig
from megagspo.errors import ConfigError, NumericsError
from megagspo.reward.base import Reward
from megagspo.reward.exact import ExactReward
from megagspo.reward.math import MathReward
from megagspo.reward.reasoning_gym import ReasoningGymReward
from megagspo.types import Prompt

REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": ExactReward,
    "math": MathReward,
    "reasoning_gym": ReasoningGymReward,
}
"""Rewards by the name they have in the configuration."""


class Scorer:
    """The rewards of the configuration's `reward` section. Close it, or use it in a `with` statement."""

    def __init__(self, entries: Sequence[RewardConfig]) -> None:
        self._weights: dict[str, float] = {}
        self._rewards: dict[str, Reward] = {}
        for entry in entries:
            if entry.name not in REWARDS:
                near = difflib.get_close_matches(entry.name, REWARDS, n=1, cutoff=0.0)
                raise ConfigError(f"reward: unknown name {entry.name!r}; the nearest is {near[0]!r}")
            if entry.name in self._rewards:
                raise ConfigError(f"reward: {entry.name!r} is there twice; keep one and add the weights up")
            self._weights[entry.name] = entry.weight
            self._rewards[entry.name] = REWARDS[entry.name]()

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[dict[str, float]]:
        """Each reward by name, one dictionary a response, in the order of the responses.

        Raises NumericsError, naming reward and sample, for a reward that is not finite: trained on, it would
        spoil its whole group without a word.
        """
        assert len(prompts) == len(texts), f"{len(prompts)} prompts but {len(texts)} responses"
        scores: list[dict[str, float]] = [{} for _ in texts]
        for name, reward in self._rewards.items():
            values = reward.score_all(prompts, texts)
            assert len(values) == len(texts), f"reward {name}: {len(values)} scores of {len(texts)} responses"
            for index, (prompt, value) in enumerate(zip(prompts, values, strict=True)):
                if not math.isfinite(value):
                    raise NumericsError(
                        f"reward {name!r} of response {index}, to prompt {prompt.id}, is {value}: "
                        f"{texts[index][:200]!r}"
                    )
                scores[index][name] = float(value)
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
