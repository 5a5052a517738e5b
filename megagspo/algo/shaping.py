"""What is added to or taken from a reward before advantages: length punishment, KL in the reward."""

from __future__ import annotations

from collections.abc import Sequence

from megagspo.config.algorithm import OverlongConfig


def overlong_punishment(length: int, limit: int, config: OverlongConfig) -> float:
    """What is subtracted from the reward of a response of `length` tokens (arXiv 2503.14476, eq. 13): 0 up to
    limit - buffer, then rising linearly to `penalty` at the limit."""
    if config.buffer == 0:
        return 0.0
    over = length - (limit - config.buffer)
    return config.penalty * min(max(over / config.buffer, 0.0), 1.0)


def returns_to_go(reward: float, penalties: Sequence[float]) -> list[float]:
    """The return at each token of a response whose reward comes at its end: reward - sum of this token's and
    all later penalties (arXiv 2501.03262, eq. 8)."""
    returns = []
    remaining = reward
    for penalty in reversed(penalties):
        remaining -= penalty
        returns.append(remaining)
    return returns[::-1]
