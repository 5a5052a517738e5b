"""The tasks' own scores, and that a malformed answer is a low score, never a crash."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from reasoning_gym.utils import extract_answer

from megagspo.config.sources import ReasoningGymSource
from megagspo.data.sources import problems_of
from megagspo.errors import DataError
from megagspo.reward.reasoning_gym import ReasoningGymReward, bounded, given_answer
from megagspo.reward.workers import Verdict
from megagspo.types import Prompt


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    made = ReasoningGymReward(workers=1)
    yield made
    made.close()


def first_problem(task: str, **settings: object) -> Prompt:
    problem = next(problems_of(ReasoningGymSource(reasoning_gym=task, size=1, config=settings)))
    return Prompt(
        id=f"{task}/0",
        source=task,
        text=problem.question,
        token_ids=(1,),
        answer=problem.answer,
        metadata=problem.metadata,
    )


@pytest.mark.parametrize(
    "task", ["chain_sum", "basic_arithmetic", "spell_backward", "gcd", "countdown", "mini_sudoku", "arc_agi"]
)
def test_the_reference_answer_scores_one(reward: ReasoningGymReward, task: str) -> None:
    problem = first_problem(task)
    assert reward.score(problem, f" {problem.answer}\n") == 1.0
    assert reward.score(problem, f"thinking <answer>{problem.answer}</answer> done") == 1.0


@pytest.mark.parametrize("text", ["309", "308+1", "1/0", "", "9**9**9**9"])
def test_countdown_answers_that_use_other_numbers_never_score_one(
    reward: ReasoningGymReward, text: str
) -> None:
    countdown = first_problem("countdown")
    metadata = {
        **countdown.metadata["reasoning_gym"],
        "metadata": {"numbers": [6, 61, 94, 4], "target": 309},
    }
    prompt = Prompt(
        id="countdown/0", source="c", text="?", token_ids=(1,), metadata={"reasoning_gym": metadata}
    )
    assert 0.0 <= reward.score(prompt, text) <= 0.1


@pytest.mark.parametrize(
    ("task", "text"),
    [("boxnet", '{"Agent": 1}'), ("prime_factorization", "garbage"), ("game_of_life", "{}")],
)
def test_a_malformed_answer_scores_zero_and_scoring_goes_on(
    reward: ReasoningGymReward, task: str, text: str
) -> None:
    assert reward.score_all([first_problem(task)] * 2, [text, text]) == [0.0, 0.0]


@pytest.mark.parametrize("task", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"])
def test_tasks_without_a_reference_answer_are_scored(reward: ReasoningGymReward, task: str) -> None:
    problem = first_problem(task)
    assert problem.answer is None
    assert 0.0 <= reward.score(problem, "nothing sensible") < 1.0


@pytest.mark.parametrize(
    ("score", "right"), [(float("nan"), 0.0), (float("inf"), 0.0), (1.5, 1.0), (-3, 0.0), (0.25, 0.25)]
)
def test_scores_are_finite_and_between_zero_and_one(score: float, right: float) -> None:
    prompt = Prompt(id="p/0", source="p", text="?", token_ids=(1,))
    assert bounded(Verdict(score), prompt=prompt) == right


def test_the_answer_is_what_the_package_itself_extracts() -> None:
    """On every text of up to five pieces that matter to the rule."""
    pieces = ["<answer>", "</answer>", "4", " \n"]
    for length in range(6):
        for chosen in itertools.product(pieces, repeat=length):
            text = "".join(chosen)
            extracted = extract_answer(text)
            assert given_answer(text) == (text.strip() if extracted is None else extracted), repr(text)


def test_a_response_of_nothing_but_opened_tags_takes_no_time() -> None:
    began = time.process_time()
    given_answer("<answer>" * 200_000)
    assert time.process_time() - began < 1


def test_a_prompt_of_another_source_is_a_users_mistake(reward: ReasoningGymReward) -> None:
    with pytest.raises(DataError, match="no reasoning-gym problem"):
        reward.score(Prompt(id="p/0", source="p", text="?", token_ids=(1,)), "5")
