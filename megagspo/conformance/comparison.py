"""Vectors against what they expect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megagspo.conformance.evaluation import Outcome, evaluate
from megagspo.conformance.vectors import Vector, VectorSample
from megagspo.errors import MegagspoError

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""How far a number may be from what is expected; the second is for sums that cancel."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A vector with what came of it: an Outcome, or the message of a refusal; wrong: where that is not what
    was expected, one line each."""

    vector: Vector
    outcome: Outcome | str
    wrong: list[str]


def run_vectors(vectors: Sequence[Vector]) -> list[Result]:
    """Each vector evaluated and compared with what it expects."""
    results = []
    for vector in vectors:
        outcome: Outcome | str
        try:
            outcome = evaluate(vector)
        except MegagspoError as error:
            outcome = str(error)
        results.append(Result(vector=vector, outcome=outcome, wrong=list(_differences(vector, outcome))))
    return results


def as_json(result: Result) -> dict[str, Any]:
    """The result as `megagspo conformance --json` writes it."""
    name, outcome = result.vector.name, result.outcome
    return {"name": name, "refused": outcome} if isinstance(outcome, str) else {"name": name, **vars(outcome)}


def _differences(vector: Vector, outcome: Outcome | str) -> Iterator[str]:
    expect = vector.expect
    if isinstance(outcome, str):
        if not expect.refused:
            yield f"refused: {outcome}"
        return
    if expect.refused:
        yield "accepted, but was to be refused"
        return
    if expect.loss is not None:
        yield from _differ("loss", expect.loss, outcome.loss)
    if expect.advantages is not None:
        samples = vector.samples
        expected, actual = _over_tokens(samples, expect.advantages), _over_tokens(samples, outcome.advantages)
        yield from _differ("advantages", expected, actual)
    if expect.gradients is not None:
        yield from _differ("gradients", expect.gradients, outcome.gradients)
    if expect.clipped is not None:
        yield from _differ("clipped", expect.clipped, outcome.clipped)


def _over_tokens(samples: Sequence[VectorSample], values: Sequence[float | list[float]]) -> list[Any]:
    """Advantages at the tokens that are learned from, however they were written."""
    if len(values) != len(samples):
        return list(values)
    return [_own(sample.mask, value) for sample, value in zip(samples, values, strict=True)]


def _own(mask: Sequence[int], value: float | list[float]) -> list[float]:
    if not isinstance(value, list):
        return [value] * max(1, sum(map(bool, mask)))
    if len(value) != len(mask):
        return value  # of a length that will not agree
    return [one for one, masked in zip(value, mask, strict=True) if masked] or value[:1]


def _differ(place: str, expected: Any, actual: Any) -> Iterator[str]:
    if not isinstance(expected, list):
        if not _agree(expected, actual):
            yield f"{place}: expected {expected}, got {actual}"
    elif len(expected) != len(actual):
        yield f"{place}: expected {len(expected)} entries, got {len(actual)}"
    else:
        for position, pair in enumerate(zip(expected, actual, strict=True)):
            yield from _differ(f"{place}.{position}", *pair)


def _agree(expected: float, actual: float) -> bool:
    both_nan = math.isnan(expected) and math.isnan(actual)
    return both_nan or math.isclose(expected, actual, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
