"""From rewards to advantages, group by group. Plain float64: rewards are few, and fp32 residues must not pass
a zero test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[str],
    *,
    baseline: Literal["group_mean", "none"] = "group_mean",
    scale: Literal["group_std", "none"] = "group_std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> list[float]:
    """A_i = (r_i - baseline) / (std + eps), both over the responses with the same group id (arXiv 2402.03300,
    4.1.2).

    rewards, groups: one entry a trainable response, in any order; groups may have any size. ddof: the divisor
    of the variance is (size - ddof). A constant group, one of a single response included, gives exactly 0.
    Order is kept. NaN stays NaN.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    advantages = [0.0] * len(rewards)
    for positions in members.values():
        values = [rewards[position] for position in positions]
        for position, advantage in zip(positions, _of_group(values, baseline, scale, ddof, eps), strict=True):
            advantages[position] = advantage
    return advantages


def _of_group(values: list[float], baseline: str, scale: str, ddof: int, eps: float) -> list[float]:
    if all(value == values[0] for value in values):  # False for NaN, which must stay visible
        constant = 0.0 if baseline == "group_mean" or scale == "group_std" else values[0]
        return [constant] * len(values)
    mean = math.fsum(values) / len(values)
    centre = mean if baseline == "group_mean" else 0.0
    if scale == "none":
        return [value - centre for value in values]
    divisor = max(1, len(values) - ddof)  # 1 for a single NaN, which comes this far
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / divisor)
    return [(value - centre) / (std + eps) for value in values]
