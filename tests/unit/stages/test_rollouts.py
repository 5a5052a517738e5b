"""Rollouts of a step, and dynamic sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from megagspo.assembly import Respondent
from megagspo.config.schema import Config
from megagspo.data import PromptStream
from megagspo.errors import DataError
from megagspo.stages.rollouts import MOST_ROUNDS, _varied, explore
from megagspo.types import Completion, Prompt, Request, SamplingParams
from tests.unit.stages.samples import sample

RESPONSES = 3
Rewards = Callable[[int], Sequence[float]]


class Engine:
    """Answers every request with one token; keeps the requests of each round."""

    def __init__(self) -> None:
        self.rounds: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], progress: Any = None) -> list[Completion]:
        self.rounds.append(list(requests))
        return [
            Completion(
                request_id=request.id,
                token_ids=(9,),
                logprobs=(-1.0,),
                finish_reason="stop",
                version_min=0,
                version_max=0,
            )
            for request in requests
        ]


class Tokenizer:
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""


class Scorer:
    """Gives the responses to the n-th prompt that it sees the rewards(n)."""

    def __init__(self, rewards: Rewards) -> None:
        self._values: Iterator[float] = (value for n in range(10**6) for value in rewards(n))

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[dict[str, float]]:
        return [{"fake": next(self._values)} for _ in prompts]

    def total(self, rewards: dict[str, float]) -> float:
        return rewards["fake"]


def varied(_: int) -> list[float]:
    return [0.0, 1.0, 0.0]


def every(nth: int) -> Rewards:
    """Only every n-th prompt has rewards that differ; the others are solved, or failed, by all."""
    return lambda n: varied(n) if n % nth == nth - 1 else [float(n % 2)] * RESPONSES


def run(rewards: Rewards, *, groups: int = 4, prompts: int = 100, dynamic: bool = True) -> Any:
    """The samples of a step, the engine with what it was asked, and the stream of prompts."""
    engine, sampling = Engine(), SamplingParams(max_new_tokens=4)
    parts: Any = (engine, Tokenizer(), Scorer(rewards), sampling)
    respondent = Respondent(
        **dict(zip(("engine", "tokenizer", "scorer", "sampling"), parts, strict=True)), seed=0
    )
    stream = PromptStream(
        [Prompt(id=f"p{i}", source="p", text="", token_ids=(i,)) for i in range(prompts)], seed=0
    )
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": [{"jsonl": "t"}]},
            "rollout": {"prompts": groups, "responses": RESPONSES},
            "algorithm": {"dynamic_sampling": dynamic},
        }
    )
    return explore(config, respondent, stream, step=7), engine, stream


def positions(engine: Engine) -> list[int]:
    """Where in the step each group that was asked for stands, by its id."""
    return [int(request.id.split("/")[1]) for requests in engine.rounds for request in requests[::RESPONSES]]


def test_without_it_a_step_has_its_prompts_whatever_their_rewards() -> None:
    samples, engine, _ = run(every(1000), dynamic=False)
    assert len(samples) == 4 * RESPONSES
    assert len(engine.rounds) == 1


def test_nothing_is_drawn_again_when_all_groups_vary() -> None:
    samples, engine, stream = run(varied)
    assert [len(requests) for requests in engine.rounds] == [4 * RESPONSES]
    assert len(samples) == 4 * RESPONSES
    assert stream.state_dict()["position"] == 4


def test_groups_whose_rewards_are_all_equal_are_replaced_by_further_prompts() -> None:
    """As many as are missing, round after round, until there are enough; in the order of drawing."""
    samples, engine, stream = run(every(2))
    kept = list(dict.fromkeys(sample.group for sample in samples))
    assert len(kept) == 4
    assert all(len({s.reward for s in samples if s.group == group}) == 2 for group in kept)
    drawn = [len(requests) // RESPONSES for requests in engine.rounds]
    assert drawn == [4, 2, 1, 1]  # two of four vary, then one of two, none of one, one
    assert stream.state_dict()["position"] == 8
    assert [int(group.split("/")[1]) for group in kept] == [1, 3, 5, 7]
    assert [s.group for s in samples] == [group for group in kept for _ in range(RESPONSES)]


def test_every_group_of_a_step_has_a_place_and_seeds_of_its_own() -> None:
    """A prompt that comes up twice in a step, the stream being short, is two groups with other samples."""
    _, engine, _ = run(every(4), prompts=3)
    assert positions(engine) == list(range(len(positions(engine))))
    requests = [request for requests in engine.rounds for request in requests]
    assert max(Counter(request.token_ids for request in requests).values()) > RESPONSES
    assert len({request.id for request in requests}) == len(requests)
    assert len({request.seed for request in requests}) == len(requests)


def test_a_step_goes_on_with_what_it_has_after_so_many_rounds() -> None:
    samples, engine, _ = run(lambda n: varied(n) if n == 0 else [1.0] * RESPONSES)
    assert len(engine.rounds) == MOST_ROUNDS
    assert len({sample.group for sample in samples}) == 1


def test_a_step_in_which_nothing_varies_says_so() -> None:
    with pytest.raises(DataError, match=r"no group of step 7 whose rewards differ, in 40 prompts"):
        run(lambda _: [1.0] * RESPONSES)


def test_a_reward_that_is_no_number_is_not_sampled_away() -> None:
    """NaN differs from everything, itself included: it stays, and stops the step later with its name."""
    samples, engine, _ = run(lambda n: [float("nan")] * RESPONSES if n == 1 else varied(n))
    assert len(engine.rounds) == 1
    assert sum(sample.reward != sample.reward for sample in samples) == RESPONSES


def test_an_aborted_response_makes_no_variety() -> None:
    """Rewards 1, 1 and an aborted 0: nothing can be learned from the group."""
    group = [sample(0, "g", 1.0), sample(1, "g", 1.0), sample(2, "g", 0.0, finish="abort")]
    assert _varied(group) == []
    assert _varied([*group, sample(3, "h", 0.0), sample(4, "h", 1.0)]) != []
