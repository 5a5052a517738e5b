"""Advantages group by group."""

from __future__ import annotations

import math

import pytest

from megagspo.algo.advantages import group_advantages


def test_uneven_groups_each_have_their_own_mean() -> None:
    """A1, first input."""
    groups = ["0"] * 4 + ["1"] * 2 + ["2"] * 3
    advantages = group_advantages([1, 2, 3, 4, 10, 12, 5, 6, 7], groups, scale="none")
    assert advantages == [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]


@pytest.mark.parametrize(("ddof", "expected"), [(1, 0.7071068), (0, 1.0)])
def test_group_of_one_gets_nothing_beside_a_group_of_two(ddof: int, expected: float) -> None:
    """A1, second input."""
    advantages = group_advantages([1, 3, 5], ["0", "0", "1"], ddof=ddof)
    # eps, 1e-6, is added to a standard deviation of 1 or 1.4.
    assert advantages == pytest.approx([-expected, expected, 0], abs=2e-6)
    assert advantages[2] == 0


def test_groups_are_found_by_id_and_order_is_kept() -> None:
    rewards, groups = [1.0, 10.0, 2.0, 12.0, 3.0, 4.0], ["a", "b", "a", "b", "a", "a"]
    assert group_advantages(rewards, groups, scale="none") == [-1.5, -1, -0.5, 1, 0.5, 1.5]


def test_sample_left_out_does_not_move_its_groups_statistics() -> None:
    """A3: the caller leaves out samples without a trainable token; these are the survivors."""
    centred = group_advantages([1, 0, 0], ["g"] * 3, scale="none")
    assert centred == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-15)
    scaled = group_advantages([1, 0, 0], ["g"] * 3)
    assert scaled == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-5)  # given to that many digits
    assert group_advantages([1], ["g"]) == [0]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.35, 1e6, -3.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_constant_group_gives_exactly_zero(value: float, size: int, scale: str) -> None:
    assert group_advantages([value] * size, ["g"] * size, scale=scale) == [0] * size  # type: ignore[arg-type]


def test_residue_of_rounding_is_no_spread() -> None:
    """As A4: fifteen equal rewards, whose float mean is not the reward itself, beside a group that has
    spread."""
    advantages = group_advantages([0.35] * 15 + [0.0, 1.0], ["a"] * 15 + ["b"] * 2)
    assert advantages[:15] == [0] * 15
    assert advantages[15] < 0 < advantages[16]


@pytest.mark.parametrize("rewards", [[math.nan], [math.nan, 1.0], [math.nan, math.nan]])
@pytest.mark.parametrize("ddof", [0, 1])
def test_nan_stays_visible_in_its_own_group(rewards: list[float], ddof: int) -> None:
    groups = ["bad"] * len(rewards) + ["good"] * 2
    advantages = group_advantages([*rewards, 0.0, 1.0], groups, ddof=ddof)
    assert all(math.isnan(advantage) for advantage in advantages[: len(rewards)])
    assert advantages[-2] == -advantages[-1] < 0


def test_without_baseline_and_scale_advantages_are_the_rewards() -> None:
    rewards = [1.0, 1.0, 0.5, 2.0]
    assert group_advantages(rewards, ["a", "a", "b", "a"], baseline="none", scale="none") == rewards
