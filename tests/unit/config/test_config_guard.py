"""Settings that contradict an objective are refused, doubtful ones warned of."""

from __future__ import annotations

from typing import Any

import pytest

from megagspo.config.algorithm import DEFAULTS, AlgorithmConfig
from megagspo.config.guard import check_group_size, check_token_advantages, guard
from megagspo.errors import ConfigError


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        guard(algorithm(**keys))
    return str(caught.value)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_objective_passes_with_its_defaults(name: str) -> None:
    assert guard(algorithm(name=name)) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "grpo", "aggregation": "token_mean"},
        {"clip_low": 0.01, "clip_high": 0.01},
        {"name": "grpo", "clip_low": 0.5, "clip_high": 5.0},
        {"name": "hybrid", "clip_low": 0.2, "clip_high": 0.27},
        {"name": "gspo_token", "dual_clip": 3.0},
        {"kl": {"coefficient": 0.1, "estimator": "k1", "where": "reward"}},
        {"kl": {"coefficient": 0.1, "reference_every": 10}},
        {"correction": {"mode": "truncate", "low": 3.0}},
        {"overlong": {"buffer": 16, "penalty": 1.0}},
        {"name": "dr_grpo", "length_constant": 64},
    ],
)
def test_ordinary_settings_pass_without_a_warning(keys: dict[str, Any]) -> None:
    assert guard(algorithm(**keys)) == []


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("keys", [{"clip_high": 0.011}, {"clip_low": 0.049}, {"clip_low": 0.0101}])
def test_a_range_above_a_hundredth_warns_for_sequence_ratios(name: str, keys: dict[str, Any]) -> None:
    (warning,) = guard(algorithm(name=name, **keys))
    for word in (name, "3e-4 and 4e-4", "arXiv 2507.18071"):
        assert word in warning


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    "keys", [{"clip_high": 0.05}, {"clip_low": 0.2}, {"clip_low": 0.2, "clip_high": 0.27}]
)
def test_the_range_of_token_ratios_is_refused_for_sequence_ratios(name: str, keys: dict[str, Any]) -> None:
    message = refused(name=name, **keys)
    for word in (name, "3e-4 and 4e-4", "arXiv 2507.18071", "remove both keys", "allow_wide_clip=true"):
        assert word in message
    (warning,) = guard(algorithm(name=name, allow_wide_clip=True, **keys))
    assert "3e-4 and 4e-4" in warning


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"aggregation": "token_mean"},
            [
                "algorithm.aggregation=token_mean",
                "algorithm.name=gspo",
                "one ratio a response",
                "sequence_mean",
            ],
        ),
        ({"aggregation": "constant_length", "length_constant": 8}, ["algorithm.aggregation=constant_length"]),
        ({"dual_clip": 3.0}, ["algorithm.dual_clip=3", "algorithm.name=gspo", "remove algorithm.dual_clip"]),
        ({"name": "cispo", "dual_clip": 3.0}, ["algorithm.dual_clip=3", "algorithm.name=cispo"]),
        ({"name": "cispo", "clip_low": 0.2}, ["algorithm.clip_low=0.2", "2506.13585", "remove"]),
        (
            {"correction": {"mode": "mask", "low": 3.0, "high": 2.0}},
            ["algorithm.correction.low=3", "high=2", "lower low"],
        ),
    ],
)
def test_contradictions_are_refused_with_a_remedy(keys: dict[str, Any], words: list[str]) -> None:
    message = refused(**keys)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"kl": {"coefficient": 0.1, "estimator": "k1"}},
            ["algorithm.kl.estimator=k1 in the loss", "zero on-policy", "k3 or k2", "where=reward"],
        ),
        (
            {"old_logprobs": "rollout", "correction": {"mode": "truncate"}},
            ["algorithm.correction", "old_logprobs=rollout", "twice", "old_logprobs=trainer"],
        ),
        (
            {"name": "dr_grpo", "advantage": {"scale": "group_std"}},
            ["scale=group_std", "dr_grpo", "2503.20783", "remove"],
        ),
        (
            {"name": "gspo_token", "aggregation": "token_mean"},
            ["aggregation=token_mean", "gspo_token", "long responses weigh more", "2507.18071"],
        ),
        (
            {"name": "gspo_token", "aggregation": "constant_length", "length_constant": 8},
            ["aggregation=constant_length", "gspo_token"],
        ),
        ({"overlong": {"penalty": 1.0}}, ["overlong.penalty=1", "buffer", "2503.14476"]),
        ({"overlong": {"buffer": 8}}, ["overlong.buffer=8", "without penalty"]),
        ({"kl": {"reference_every": 5}}, ["kl.reference_every=5", "kl.coefficient=0"]),
        (
            {"length_constant": 8},
            ["length_constant=8", "aggregation=sequence_mean", "aggregation=constant_length"],
        ),
    ],
)
def test_doubtful_settings_warn(keys: dict[str, Any], words: list[str]) -> None:
    (warning,) = guard(algorithm(**keys))
    for word in words:
        assert word in warning


@pytest.mark.parametrize(
    "advantage",
    [{}, {"baseline": "leave_one_out", "scale": "none"}, {"baseline": "none"}, {"baseline": "batch_mean"}],
)
def test_one_response_a_prompt_has_no_group(advantage: dict[str, Any]) -> None:
    config = algorithm(name="grpo", advantage=advantage)
    with pytest.raises(ConfigError, match=r"rollout\.responses=1 .*set rollout\.responses=2"):
        check_group_size(config, 1)
    check_group_size(config, 2)


@pytest.mark.parametrize(
    "keys", [{"name": "reinforce_pp"}, {"advantage": {"baseline": "none", "scale": "none"}}]
)
def test_one_response_a_prompt_is_enough_for_the_batch(keys: dict[str, Any]) -> None:
    check_group_size(algorithm(**keys), 1)


def test_advantages_a_token_are_for_gspo_token() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name=gspo .*algorithm\.name=gspo_token"):
        check_token_advantages(algorithm())
    for name in DEFAULTS:
        if name != "gspo":
            check_token_advantages(algorithm(name=name))
