"""Requests of a step: ids, groups, seeds."""

from __future__ import annotations

from typing import Any

from megagspo.rollout.collect import build_requests, group_id, request_seed
from megagspo.types import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8)
SEED = 983022607147549222


def prompt(index: int) -> Prompt:
    return Prompt(id=f"sums/{index}", source="sums", text="", token_ids=(index, index + 1))


def requests_of(*prompts: Prompt, **settings: Any) -> list[Request]:
    settings = {"responses": 3, "sampling": SAMPLING, "run_seed": 1, "step": 2, **settings}
    return build_requests(prompts, **settings)


def test_responses_of_a_prompt_stand_side_by_side_under_its_group() -> None:
    prompts = [prompt(4), prompt(9)]
    requests = requests_of(*prompts)
    assert [r.token_ids for r in requests] == [(4, 5)] * 3 + [(9, 10)] * 3
    assert [r.id for r in requests[3:]] == [
        f"{group_id(prompts[1], step=2, position=1)}#{i}" for i in range(3)
    ]
    assert requests[0].sampling is SAMPLING


def test_one_prompt_twice_in_a_step_makes_two_groups_and_other_samples() -> None:
    requests = requests_of(prompt(4), prompt(4))
    assert len({r.id for r in requests}) == len({r.seed for r in requests}) == 6
    later = requests_of(prompt(4), first_position=2)
    assert len({r.id for r in requests + later}) == 9


def test_seeds_are_stable_and_differ_by_run_step_prompt_position_and_sample() -> None:
    place = {"run_seed": 7, "step": 10, "position": 0, "index": 0}
    # A fixed value: a change here makes old runs impossible to repeat.
    assert request_seed(prompt(4), **place) == SEED
    others = [request_seed(prompt(4), **{**place, key: place[key] + 1}) for key in place]
    others.append(request_seed(prompt(5), **place))
    assert len({SEED, *others}) == 6
    assert all(0 <= seed < 2**63 for seed in others)
