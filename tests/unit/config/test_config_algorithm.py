"""The `algorithm` section: defaults that depend on the objective, and what is filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from megagspo.config import Config, dump_config
from megagspo.config.algorithm import DEFAULTS, AlgorithmName, between_ranges

Load = Callable[..., Config]

PUBLISHED = {  # clip_low, clip_high, aggregation, baseline, scale
    "gspo": (3e-4, 4e-4, "sequence_mean", "group_mean", "group_std"),
    "gspo_token": (3e-4, 4e-4, "sequence_mean", "group_mean", "group_std"),
    "grpo": (0.2, 0.2, "sequence_mean", "group_mean", "group_std"),
    "dr_grpo": (0.2, 0.2, "constant_length", "group_mean", "none"),
    "dapo": (0.2, 0.28, "token_mean", "group_mean", "group_std"),
    "cispo": (None, 4.0, "token_mean", "group_mean", "group_std"),
    "rloo": (0.2, 0.2, "token_mean", "leave_one_out", "none"),
    "reinforce_pp": (0.2, 0.2, "token_mean", "batch_mean", "batch_std"),
    "hybrid": (*between_ranges(0.5), "sequence_mean", "group_mean", "group_std"),
}


def test_every_name_has_defaults() -> None:
    assert set(get_args(AlgorithmName)) == set(DEFAULTS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_left_out_are_those_of_the_named_algorithm(load: Load, name: str) -> None:
    algorithm = load(f"algorithm.name={name}").algorithm
    advantage = algorithm.advantage
    found = (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation)
    assert (*found, advantage.baseline, advantage.scale) == PUBLISHED[name]
    assert (advantage.ddof, advantage.eps) == (1, 1e-6)


@pytest.mark.parametrize("weight", [0, 0.25, 1])
def test_the_range_of_hybrid_follows_its_weight(load: Load, weight: float) -> None:
    algorithm = load(f"algorithm={{name: hybrid, hybrid_weight: {weight}}}").algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == between_ranges(weight)
    given = load(f"algorithm={{name: hybrid, hybrid_weight: {weight}, clip_low: 0.1}}").algorithm
    assert (given.clip_low, given.clip_high) == (0.1, between_ranges(weight)[1])


def test_a_null_setting_is_left_out_and_a_given_one_stays(load: Load) -> None:
    algorithm = load(
        "algorithm={name: grpo, clip_low: null, clip_high: 0.28, aggregation: token_mean}"
    ).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (0.2, 0.28, "token_mean")


@pytest.mark.parametrize("advantage", ["{ddof: 0}", "{ddof: 0, baseline: null}", "{ddof: 0, scale: null}"])
def test_one_key_of_advantage_leaves_the_algorithms_others(load: Load, advantage: str) -> None:
    found = load(f"algorithm={{name: rloo, advantage: {advantage}}}").algorithm.advantage
    assert (found.baseline, found.scale, found.ddof) == ("leave_one_out", "none", 0)


def test_a_saved_configuration_holds_the_values_used(load: Load) -> None:
    text = dump_config(load("algorithm.name=rloo"))
    for line in ("clip_low: 0.2", "aggregation: token_mean", "baseline: leave_one_out"):
        assert line in text


def test_a_reference_is_wanted_only_for_a_coefficient(load: Load) -> None:
    assert not load("algorithm.kl.estimator=k2").algorithm.needs_reference
    for where in ("loss", "reward"):
        assert load(f"algorithm.kl={{coefficient: 0.1, where: {where}}}").algorithm.needs_reference


def test_the_trainers_own_pass_is_spared_where_nothing_needs_it(load: Load) -> None:
    assert load().algorithm.needs_trainer_pass
    assert not load("algorithm.old_logprobs=rollout").algorithm.needs_trainer_pass
    both = load("algorithm={old_logprobs: rollout, correction: {mode: mask}}").algorithm
    assert both.needs_trainer_pass
