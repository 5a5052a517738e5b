"""Advantages: group by group or over the batch, of responses or of their tokens."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from megagspo.algo.advantages import advantages, token_advantages
from megagspo.config.algorithm import AdvantageConfig
from tests.conformance import papers

CENTRED = AdvantageConfig(scale="none")
LEAVE_ONE_OUT = AdvantageConfig(baseline="leave_one_out", scale="none")
BATCH = AdvantageConfig(baseline="batch_mean", scale="batch_std")
BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none")
SCALES = ("group_std", "batch_std", "none")


def test_uneven_groups_each_have_their_own_mean() -> None:
    """A1, first input."""
    groups = ["0"] * 4 + ["1"] * 2 + ["2"] * 3
    found = advantages([1, 2, 3, 4, 10, 12, 5, 6, 7], groups, CENTRED)
    assert found == [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]


@pytest.mark.parametrize(("ddof", "expected"), [(1, 0.7071068), (0, 1.0)])
def test_group_of_one_gets_nothing_beside_a_group_of_two(ddof: int, expected: float) -> None:
    """A1, second input."""
    found = advantages([1, 3, 5], ["0", "0", "1"], AdvantageConfig(ddof=ddof))
    # eps, 1e-6, is added to a standard deviation of 1 or 1.4.
    assert found == pytest.approx([-expected, expected, 0], abs=2e-6)
    assert found[2] == 0


def test_groups_are_found_by_id_and_order_is_kept() -> None:
    rewards, groups = [1.0, 10.0, 2.0, 12.0, 3.0, 4.0], ["a", "b", "a", "b", "a", "a"]
    assert advantages(rewards, groups, CENTRED) == [-1.5, -1, -0.5, 1, 0.5, 1.5]


def test_sample_left_out_does_not_move_its_groups_statistics() -> None:
    """A3: the caller leaves out samples without a trainable token; these are the survivors."""
    centred = advantages([1, 0, 0], ["g"] * 3, CENTRED)
    assert centred == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-15)
    scaled = advantages([1, 0, 0], ["g"] * 3)
    assert scaled == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-5)  # given to that many digits
    assert advantages([1], ["g"]) == [0]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.35, 1e6, -3.7, 1e100])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
def test_constant_group_gives_exactly_zero(value: float, size: int, baseline: Any, scale: Any) -> None:
    config = AdvantageConfig(baseline=baseline, scale=scale)
    beside = [0.0, 1.0, 2.0]
    found = advantages([value] * size + beside, ["g"] * size + ["other"] * 3, config)
    assert found[:size] == [0] * size
    assert found[size] < 0 < found[-1]


def test_constant_batch_gives_exactly_zero() -> None:
    groups = ["a", "a", "b", "b", "b"]
    assert advantages([0.35] * 5, groups, BATCH) == [0] * 5


def test_constant_group_that_differs_from_the_batch_is_learned_from_with_a_batch_baseline() -> None:
    found = advantages([1, 1, 0, 0], ["a", "a", "b", "b"], BATCH)
    assert found == pytest.approx([0.75**0.5, 0.75**0.5, -(0.75**0.5), -(0.75**0.5)], abs=2e-6)  # eps


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_residue_of_rounding_is_no_spread(baseline: Any) -> None:
    """A4: fifteen equal rewards, whose float mean is not the reward itself, beside a group that has
    spread."""
    config = AdvantageConfig(baseline=baseline)
    found = advantages([0.35] * 15 + [0.0, 1.0], ["a"] * 15 + ["b"] * 2, config)
    assert found[:15] == [0] * 15
    assert found[15] < 0 < found[16]


def test_odd_one_out_is_not_blown_up() -> None:
    """A4: seven rewards .35 and one 0. Its peers agree exactly, so its leave-one-out advantage is -.35; the
    others' is .35 / 7."""
    found = advantages([0.35] * 7 + [0.0], ["g"] * 8, LEAVE_ONE_OUT)
    assert found == pytest.approx([0.05] * 7 + [-0.35], rel=1e-14)
    scaled = advantages([0.35] * 7 + [0.0], ["g"] * 8, AdvantageConfig(baseline="leave_one_out"))
    assert max(map(abs, scaled)) < 3  # in units of the group's own deviation, not of a residue


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    """arXiv 2402.14740, section 2.1."""
    rewards, groups = [3.0, 1.0, -2.0, 5.0, 0.5], ["a", "b", "a", "a", "b"]
    centred = advantages(rewards, groups, CENTRED)
    sizes = [groups.count(group) for group in groups]
    expected = [value * n / (n - 1) for value, n in zip(centred, sizes, strict=True)]
    assert advantages(rewards, groups, LEAVE_ONE_OUT) == pytest.approx(expected, rel=1e-14)


def test_batch_baseline_and_scale_standardise_the_batch() -> None:
    """arXiv 2501.03262: mean 0 and deviation 1 over all samples, whatever their groups."""
    rewards = [3.0, 1.0, -2.0, 5.0, 0.5]
    found = torch.tensor(advantages(rewards, ["a", "b", "a", "c", "b"], BATCH), dtype=torch.float64)
    assert found.mean().item() == pytest.approx(0, abs=1e-15)
    assert found.std().item() == pytest.approx(1, rel=1e-6)  # eps against a deviation of 2.6


def test_without_baseline_and_scale_advantages_are_the_rewards() -> None:
    rewards = [1.0, 1.0, 0.5, 2.0]
    config = AdvantageConfig(baseline="none", scale="none")
    assert advantages(rewards, ["a", "a", "b", "a"], config) == rewards


@pytest.mark.parametrize(
    ("baseline", "scale", "ddof"), list(itertools.product(BASELINES, SCALES, (0, 1))), ids=str
)
@pytest.mark.parametrize("a_token", [False, True])
def test_every_baseline_and_scale_is_the_transcription(
    baseline: Any, scale: Any, ddof: int, a_token: bool
) -> None:
    """With a return at each token, too: each response counts once, whatever its length."""
    draw = random.Random(5)
    groups = [draw.choice("abc") for _ in range(12)]
    returns = [[draw.choice([0.0, 0.5, 1.0, 2.0])] * draw.randint(1, 5) for _ in groups]
    if a_token:
        returns = [[value - 0.1 * t for t, value in enumerate(row)] for row in returns]
    config = AdvantageConfig(baseline=baseline, scale=scale, ddof=ddof, eps=1e-3)
    expected = [
        papers.centred(
            config.model_dump(),
            own,
            group=[r for r, g in zip(returns, groups, strict=True) if g == group],
            others=[r for r, g in zip(returns, groups, strict=True) if g == group and r is not own],
            batch=returns,
        )
        for own, group in zip(returns, groups, strict=True)
    ]
    actual = token_advantages(returns, groups, config)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("rewards", [[math.nan], [math.nan, 1.0], [math.nan, math.nan]])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_nan_stays_visible_in_its_own_group(rewards: list[float], ddof: int, baseline: Any) -> None:
    groups = ["bad"] * len(rewards) + ["good"] * 2
    found = advantages([*rewards, 0.0, 1.0], groups, AdvantageConfig(baseline=baseline, ddof=ddof))
    assert all(math.isnan(advantage) for advantage in found[: len(rewards)])
    assert found[-2] == -found[-1] < 0


def test_nan_reaches_all_that_a_batch_baseline_mixes_it_with() -> None:
    assert all(map(math.isnan, advantages([math.nan, 0.0, 1.0], ["a", "b", "b"], BATCH)))


@pytest.mark.parametrize("rewards", [[math.inf, -math.inf], [1e308, 1e308, -1e308], [math.inf, 1.0]])
def test_what_overflows_is_visible_and_no_crash(rewards: list[float]) -> None:
    found = advantages(rewards, ["g"] * len(rewards))
    assert not all(map(math.isfinite, found)) or found == [0] * len(found)
