"""From rewards to advantages, group by group. Plain float64: rewards are few, and fp32 residues must not pass
a zero test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from megagspo.config.algorithm import AdvantageConfig

Values = Sequence[Sequence[float]]


def advantages(
    rewards: Sequence[float], groups: Sequence[str], config: AdvantageConfig | None = None
) -> list[float]:
    """A_i = (r_i - baseline) / (std + eps) of each response (arXiv 2402.03300, 4.1.2); see `AdvantageConfig`.

    rewards, groups: one entry a trainable response, in any order; a group is what shares an id, and may have
    any size. leave_one_out: the mean of the other responses of the group (arXiv 2402.14740). ddof: the
    divisor of a variance is (size - ddof). What is constant - the group, or for a batch baseline or scale the
    batch - gives exactly 0, a group of a single response included. Order is kept. NaN stays NaN.
    """
    returns = [[reward] for reward in rewards]
    return [value for (value,) in token_advantages(returns, groups, config)]


def token_advantages(
    returns: Values, groups: Sequence[str], config: AdvantageConfig | None = None
) -> list[list[float]]:
    """As `advantages`, where a response has a return at each of its tokens instead of one reward.

    Means and deviations count each response once, whatever its length: a response's value is the mean of its
    returns, and its part of a variance the mean of their squared distances. With equal returns over each
    response this is `advantages`.
    """
    config = config or AdvantageConfig()
    members: dict[str, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    populations = {
        group: _Population([returns[position] for position in positions], config.ddof)
        for group, positions in members.items()
    }
    batch = _Population(returns, config.ddof)
    return [
        _centred(values, populations[group], batch, config)
        for values, group in zip(returns, groups, strict=True)
    ]


class _Population:
    """Responses whose statistics are taken together. `constant` is decided by equality, not by a small
    deviation, which rounding can leave or take."""

    def __init__(self, values: Values, ddof: int) -> None:
        flat = [value for response in values for value in response]
        means = [_sum(row) / len(row) for row in values]
        self.size = len(values)
        self.total = _sum(means)
        self.mean = self.total / self.size if values else 0.0
        self.constant = all(value == flat[0] for value in flat)  # False for NaN, which must stay visible
        squares = [_sum([(v - self.mean) * (v - self.mean) for v in row]) / len(row) for row in values]
        self.std = math.sqrt(_sum(squares) / max(1, self.size - ddof))


def _centred(
    values: Sequence[float], group: _Population, batch: _Population, config: AdvantageConfig
) -> list[float]:
    concerned = {
        "group_mean": group,
        "leave_one_out": group,
        "batch_mean": batch,
        "group_std": group,
        "batch_std": batch,
    }
    if any(concerned[word].constant for word in (config.baseline, config.scale) if word != "none"):
        return [0.0] * len(values)
    if config.baseline == "leave_one_out":
        own = _sum(values) / len(values)
        # A single response that is NaN has no others; it comes this far, since NaN is no constant.
        baseline = (group.total - own) / (group.size - 1) if group.size > 1 else own
    else:
        baseline = 0.0 if config.baseline == "none" else concerned[config.baseline].mean
    if config.scale == "none":
        return [value - baseline for value in values]
    return [(value - baseline) / (concerned[config.scale].std + config.eps) for value in values]


def _sum(values: Sequence[float]) -> float:
    """Correctly rounded; what overflows, or holds infinities of both signs, is infinite or NaN and no
    error."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
