"""Rewards together: by name, in order, weighted; and what they may not be."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from megagspo.config.schema import RewardConfig
from megagspo.errors import DataError
from megagspo.reward.base import Reward
from megagspo.reward.exact import ExactReward
from megagspo.reward.scoring import REWARDS, Scorer, check_prompts
from megagspo.types import Prompt


def prompt(answer: str, index: int = 0) -> Prompt:
    return Prompt(id=f"p/{index}", source="p", text="?", token_ids=(1,), answer=answer)


@pytest.mark.parametrize(
    ("text", "score"), [("116", 1.0), (" 116\n", 1.0), ("117", 0.0), ("116 117", 0.0), ("", 0.0)]
)
def test_exact_compares_stripped_texts(text: str, score: float) -> None:
    assert ExactReward().score(prompt("116"), text) == score


def test_total_is_the_weighted_sum_in_the_order_of_the_responses() -> None:
    entries = [RewardConfig(name="exact", weight=0.5), RewardConfig(name="math", weight=2.0)]
    with Scorer(entries) as scorer:
        scores = scorer.score([prompt("1/2", 0), prompt("3", 1), prompt("4", 2)], ["1/2", "6/2", "no"])
        assert scores == [
            {"exact": 1.0, "math": 1.0},
            {"exact": 0.0, "math": 1.0},
            {"exact": 0.0, "math": 0.0},
        ]
        assert [scorer.total(each) for each in scores] == [2.5, 2.0, 0.0]


def test_a_reward_that_is_not_a_number_stays_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever learns or scores from it names the sample: `rollout.store.check_finite`."""

    class Broken(Reward):
        def score(self, prompt: Prompt, text: str) -> float:
            return float("nan") if text == "b" else 1.0

    monkeypatch.setitem(REWARDS, "exact", Broken)
    scorer = Scorer([RewardConfig(name="exact")])
    right, wrong = scorer.score([prompt("1", 0), prompt("1", 1)], ["a", "b"])
    assert right == {"exact": 1.0}
    assert math.isnan(wrong["exact"])
    assert math.isnan(scorer.total(wrong))


def test_a_prompt_that_a_reward_cannot_judge_is_named_before_anything_is_scored() -> None:
    """Each reward of the list is asked about each prompt."""
    answered, open_ended = prompt("1", 0), Prompt(id="p/1", source="p", text="?", token_ids=(1,))
    for name, words in (("exact", "'exact' compares"), ("math", "'math' compares")):
        check_prompts([RewardConfig(name=name)], [answered])  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"prompt p/1 has no reference answer.*{words}"):
            check_prompts([RewardConfig(name=name)], [answered, open_ended])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"prompt p/0 is no reasoning-gym problem"):
        check_prompts([RewardConfig(name="exact"), RewardConfig(name="reasoning_gym")], [answered])


def test_votes_are_counted_by_the_first_reward_that_knows_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Length(Reward):
        def score(self, prompt: Prompt, text: str) -> float:
            return float(len(text))

    monkeypatch.setitem(REWARDS, "exact", Length)
    assert Scorer([RewardConfig(name="exact")]).voter is None
    with Scorer([RewardConfig(name="exact"), RewardConfig(name="math")]) as scorer:
        assert scorer.voter is not None
        name, reward = scorer.voter
        assert (name, reward.answer("so the answer is 4.")) == ("math", "4")


@pytest.mark.parametrize(("text", "answer"), [(" 116\n", "116"), (" \n", None)])
def test_the_answer_of_an_exact_reward_is_the_whole_response(text: str, answer: str | None) -> None:
    assert ExactReward().answer(text) == answer


def test_every_reward_of_the_schema_is_there() -> None:
    assert set(REWARDS) == set(RewardConfig.model_fields["name"].annotation.__args__)  # type: ignore[union-attr]


def test_importing_rewards_loads_no_heavy_library() -> None:
    code = (
        "import sys, megagspo.reward.scoring, megagspo.data;"
        "heavy = {'torch', 'megatron', 'sympy', 'math_verify', 'reasoning_gym', 'transformers'};"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
