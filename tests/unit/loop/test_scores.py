"""avg@k, pass@k, maj@k against independent references: every subset and every way to break a tie, counted."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest

from megagspo.scores import majority, pass_at, scores, standard_error
from megagspo.types import Sample
from tests.unit.stages.samples import sample


@pytest.mark.parametrize("responses", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(responses: int) -> None:
    for right in range(responses + 1):
        outcomes = [True] * right + [False] * (responses - right)
        for k in range(1, responses + 1):
            subsets = list(itertools.combinations(outcomes, k))
            expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
            assert pass_at(k, responses=responses, right=right) == pytest.approx(float(expected), abs=1e-12)


def test_pass_at_k_stays_exact_where_factorials_overflow() -> None:
    """One right response of 2000: the chance to draw it among 500 is a quarter."""
    assert pass_at(500, responses=2000, right=1) == pytest.approx(0.25, abs=1e-12)


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(AssertionError, match="pass@5 of 4"):
        pass_at(5, responses=4, right=1)


def broken_by_chance(votes: list[tuple[str | None, bool]]) -> float:
    """The mean over every order of the votes, of the most frequent answers the first one met winning."""
    verdicts = []
    for order in itertools.permutations(votes):
        answers = [answer for answer, _ in order if answer is not None]
        winner = statistics.mode(answers) if answers else None  # the first one met, of several
        verdicts.append(dict(order).get(winner, False) if winner is not None else False)
    return statistics.fmean(verdicts)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("4", True), ("4", True), ("5", False)], 1.0),
        ([("4", True), ("5", False), ("5", False)], 0.0),
        ([("4", True), ("5", False)], 0.5),
        ([("4", True), ("5", False), ("6", False), (None, False)], 1 / 3),
        ([("4", True), (None, False), (None, False)], 1.0),  # who has no answer has no vote
        ([(None, False), (None, False)], 0.0),
        ([("4", True), ("4", True), ("5", False), ("5", False), ("6", False)], 0.5),
    ],
)
def test_the_majority_is_that_of_ties_broken_by_chance(
    votes: list[tuple[str | None, bool]], expected: float
) -> None:
    assert majority(votes) == pytest.approx(expected)
    assert majority(votes) == pytest.approx(broken_by_chance(votes))


def answers(**responses: str) -> list[Sample]:
    """Groups by name, a letter a response: r is right and says R, other letters say themselves, - says
    nothing."""
    return [
        Sample(**{**vars(sample(i, group, float(letter == "r"))), "text": letter})
        for group, letters in responses.items()
        for i, letter in enumerate(letters)
    ]


def answered(sample: Sample) -> tuple[str | None, bool]:
    return None if sample.text == "-" else sample.text, sample.text == "r"


def test_scores_are_means_over_prompts() -> None:
    """a: 3 of 4 right, b: 1 of 4 and a tie of three, c: none, the majority without an answer."""
    found = scores(answers(a="rrrx", b="rxyy", c="--xx"), solved=1.0, answered=answered)
    assert found == pytest.approx(
        {
            "avg@4": (3 + 1 + 0) / 12,
            "avg@4_standard_error": statistics.stdev([0.75, 0.25, 0.0]) / math.sqrt(3),
            "pass@1": (3 + 1 + 0) / 12,
            "pass@2": (1 + 0.5 + 0) / 3,
            "pass@4": 2 / 3,
            "maj@4": 1 / 3,
        }
    )


def test_every_power_of_two_and_k_itself_are_passed_at() -> None:
    for k, expected in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        found = scores(answers(a="r" * k, b="x" * k), solved=1.0)
        assert [name for name in found if name.startswith("pass@")] == [f"pass@{j}" for j in expected]


def test_what_does_not_apply_is_absent() -> None:
    assert set(scores(answers(a="rx"), solved=1.0)) == {"avg@2", "pass@1", "pass@2"}


def test_partial_rewards_count_in_the_average_and_not_as_solved() -> None:
    half = [sample(0, "a", 0.5), sample(1, "a", 0.5)]
    assert scores(half, solved=1.0) == {"avg@2": 0.5, "pass@1": 0.0, "pass@2": 0.0}


def test_the_standard_error_takes_the_prompt_as_its_unit() -> None:
    """Ten equal responses to each prompt tell no more than one: the error must not shrink with k."""
    one, ten = answers(a="r", b="x", c="x"), answers(a="r" * 10, b="x" * 10, c="x" * 10)
    expected = math.sqrt(1 / 3 / 3)  # of means 1, 0, 0: variance 1/3 with n - 1, over 3 prompts
    assert standard_error([1, 0, 0]) == pytest.approx(expected)
    assert scores(one, solved=1.0)["avg@1_standard_error"] == pytest.approx(expected)
    assert scores(ten, solved=1.0)["avg@10_standard_error"] == pytest.approx(expected)
