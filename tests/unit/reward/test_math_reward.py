"""Mathematical equality, and that nothing a response holds can stop the scoring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from megagspo.errors import DataError
from megagspo.reward.math import MathReward, answer_of
from megagspo.types import Prompt


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward(workers=2, time_limit=5.0)
    yield made
    made.close()


def prompt(answer: str | None) -> Prompt:
    return Prompt(id="p/0", source="p", text="?", token_ids=(1,), answer=answer)


@pytest.mark.parametrize(
    ("reference", "text", "score"),
    [
        ("840", r"so \boxed{840} ... **Final Answer** \boxed{840}", 1.0),
        ("4", r"\boxed{004} and again \boxed{004}", 1.0),
        ("840840", r"\boxed{840} ... \boxed{840}", 0.0),
        ("1331 and 1728", r"\boxed{1728}", 0.0),
        ("1331 and 1728", "1728", 0.0),
        ("1331 and 1728", r"\boxed{1728, 1331}", 1.0),
        ("1331 and 1728", "1728 and 1331", 1.0),
        ("1728", r"\boxed{1331, 1728}", 0.0),
        ("1728", "1331 and 1728", 0.0),
        (r"$\{1331,1728\}$", r"\boxed{1728}", 0.0),
        (r"$\{1331,1728\}$", r"\boxed{1331 \text{ and } 1728}", 1.0),
        (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}", 1.0),
        (r"\frac{1}{3}", r"\boxed{2/6}", 1.0),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", 1.0),
        ("5", r"\boxed{x = 5}", 1.0),
        ("1,728", r"\boxed{1728}", 1.0),
        ("42", "2+40=42\n#### 42\n" + "and so on, " * 44, 1.0),
        ("Natalia sold 24 more.\n#### 72", r"\boxed{72}", 1.0),
        ("12", "First 3 times 4.\nThe answer is 12.", 1.0),
        ("5", "I don't know.", 0.0),
        ("5", r"\boxed{}", 0.0),
        ("5", "", 0.0),
    ],
)
def test_score_is_equality_of_the_last_answer_with_the_whole_reference(
    reward: MathReward, reference: str, text: str, score: float
) -> None:
    assert reward.score(prompt(reference), text) == score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{137}", "137"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\frac{1}{\boxed{2}}}", "2"),
        (r"\boxed{7} and then \boxed{8 was cut o", "7"),
        (r"f(x) } = 3 \boxed{4}", "4"),
        ("#### 1\n#### 2", "2"),
        ("", None),
    ],
)
def test_answer_is_the_last_one_given(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_finding_the_answer_takes_linear_time() -> None:
    started = time.monotonic()
    assert answer_of(r"\boxed{" * 50_000) is not None
    assert time.monotonic() - started < 2.0


def test_a_thread_scores_as_the_main_thread_does(reward: MathReward) -> None:
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(reward.score(prompt(r"\frac{1}{3}"), r"\boxed{\tfrac{2}{6}}"))
    )
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_scores_stay_in_the_order_of_the_responses(reward: MathReward) -> None:
    texts = [r"\boxed{10/2}", "I don't know.", r"\boxed{137}", "I don't know.", r"\boxed{5.0}"]
    assert reward.score_all([prompt("5")] * 5, texts) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_hung_judgements_count_zero_and_hold_no_worker_for_ever() -> None:
    reward = MathReward(workers=2, time_limit=1.0)
    try:
        reward.score(prompt("5"), r"\boxed{6}")  # the first start is not what is measured
        started = time.monotonic()
        hung = r"\boxed{9^{9^{9^{9}}}}"
        deep = r"\boxed{" + "(" * 3000 + "5" + ")" * 3000 + "}"
        texts = [hung, hung, hung, deep, r"\boxed{10/2}"]
        assert reward.score_all([prompt("5")] * 5, texts)[-1] == 1.0
        assert reward.score_all([prompt("5")] * 3, texts[:3]) == [0.0, 0.0, 0.0]
        assert time.monotonic() - started < 60.0
    finally:
        reward.close()


def test_a_prompt_without_a_reference_answer_is_a_users_mistake(reward: MathReward) -> None:
    with pytest.raises(DataError, match="p/0"):
        reward.score(prompt(None), "5")
