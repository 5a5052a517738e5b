"""The metrics of a run as series over its steps, with what is absent kept apart from what is not finite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """steps: strictly increasing; values[name][i]: the metric at steps[i], None where its record has no such
    key. A value may be NaN or infinite: then it is in the file like that."""

    steps: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric is recorded, values that are not finite included."""
        return [
            (step, value)
            for step, value in zip(self.steps, self.values.get(name, ()), strict=False)
            if value is not None
        ]

    def finite(self, name: str) -> list[float]:
        return [value for _, value in self.points(name) if math.isfinite(value)]

    def not_finite(self) -> dict[str, int]:
        """How many recorded values of each metric are NaN or infinite, where any are."""
        counts = {name: len(self.points(name)) - len(self.finite(name)) for name in self.values}
        return {name: count for name, count in counts.items() if count}

    def elapsed(self) -> tuple[float, ...] | None:
        """Seconds spent in steps until the end of each recorded step, from the first recorded one on; None
        unless every record has a finite `time/step`."""
        seconds = self.finite("time/step")
        if len(seconds) != len(self.steps):
            return None
        return tuple(accumulate(seconds))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One metric in a line of numbers, over its finite values; first and last are the file's, as they are."""

    name: str
    records: int
    first: float
    last: float
    lowest: float
    mean: float
    highest: float


def summaries(metrics: Metrics) -> Iterator[Summary]:
    """Every metric of the run, in the order of its names."""
    for name in sorted(metrics.values):
        values = [value for _, value in metrics.points(name)]
        finite = metrics.finite(name) or [math.nan]
        yield Summary(
            name=name,
            records=len(values),
            first=values[0],
            last=values[-1],
            lowest=min(finite),
            mean=statistics.fmean(finite),
            highest=max(finite),
        )


def as_metrics(records: Sequence[Mapping[str, Any]]) -> Metrics:
    """Series from the records of `metrics.jsonl`. Of two records of one step the later counts. Raises
    ValueError for a record that is not what a run writes."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"line {number} is no record of a step")
        for name, value in record.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"line {number}: {name} is {value!r}, not a number")
        by_step[record["step"]] = record
    steps = sorted(by_step)
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name != "step")
    return Metrics(
        steps=tuple(steps),
        values={
            name: tuple(float(by_step[s][name]) if name in by_step[s] else None for s in steps)
            for name in names
        },
    )
