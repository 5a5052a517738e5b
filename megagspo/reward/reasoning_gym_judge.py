"""A reasoning-gym task's own score. Imported in worker processes only: the package is slow to load."""

from __future__ import annotations

import functools
from typing import Any

import reasoning_gym

from megagspo.reward.reasoning_gym import given_answer

# These compare with tuples, which metadata that has been through JSON holds as lists.
TASKS_WITH_TUPLES = frozenset({"arc_agi", "rearc"})


def judge(
    *, task: str, config: dict[str, Any], question: str, metadata: Any, answer: str | None, text: str
) -> float:
    """The task's score of the response. Raises, or hangs, as the task's scorer pleases."""
    if task in TASKS_WITH_TUPLES:
        metadata = _tuples(metadata)
    entry = {"question": question, "answer": answer, "metadata": metadata}
    return float(_dataset(task, _Settings(config)).score_answer(given_answer(text), entry))


class _Settings(dict[str, Any]):
    """Settings of a task as a cache key: by their text, as lists among them have no hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: _Settings) -> Any:
    return reasoning_gym.create_dataset(task, size=1, seed=0, **config)


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
