"""Mathematical equality of two answers. Imported in worker processes only: sympy takes a second to load."""

from __future__ import annotations

import functools
import logging
from typing import Any

import math_verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off


def judge(*, answer: str, reference: str) -> float:
    """1.0 when equal. Without math-verify's own time limits: the worker bounds the time."""
    return float(math_verify.verify(_parsed(reference), _parsed(answer), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)  # the responses of a group share one reference
def _parsed(answer: str) -> list[Any]:
    # Boxed, a list is parsed as the set it is; bare, only its last number would count.
    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
