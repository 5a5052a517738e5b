"""What is taken from rewards: length punishment, and penalties along a response."""

from __future__ import annotations

import pytest

from megagspo.algo.shaping import overlong_punishment, returns_to_go
from megagspo.config.algorithm import OverlongConfig

PAPER = OverlongConfig(buffer=4096, penalty=1.0)
"""arXiv 2503.14476, section 3.4: expected length 16384 and 4096 more."""


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(1, 0.0), (16384, 0.0), (16385, 1 / 4096), (18432, 0.5), (20479, 4095 / 4096), (20480, 1.0)],
)
def test_the_punishment_rises_over_the_buffer(length: int, punishment: float) -> None:
    """0 up to limit - buffer, then linearly to the full penalty at the limit."""
    assert overlong_punishment(length, 20480, PAPER) == punishment


def test_it_is_never_more_than_the_penalty() -> None:
    """A response may be longer than the limit of now: replayed from a run that had another."""
    assert overlong_punishment(30000, 20480, PAPER) == 1.0


def test_penalty_scales_it() -> None:
    assert overlong_punishment(9, 10, OverlongConfig(buffer=2, penalty=0.5)) == 0.25


def test_without_a_buffer_nothing_is_punished() -> None:
    assert overlong_punishment(10, 10, OverlongConfig(penalty=1.0)) == 0.0
    assert overlong_punishment(10, 10, OverlongConfig()) == 0.0


def test_a_buffer_as_long_as_the_limit_punishes_from_the_first_token() -> None:
    config = OverlongConfig(buffer=4, penalty=1.0)
    assert [overlong_punishment(n, 4, config) for n in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_a_return_holds_this_tokens_and_all_later_penalties() -> None:
    """arXiv 2501.03262, eq. 8: the reward comes at the end, a token's penalty where it is written."""
    assert returns_to_go(1.0, [0.5, 0.25, 0.125]) == [0.125, 0.625, 0.875]
    assert returns_to_go(2.0, [0.0]) == [2.0]
