"""A step's metrics: by hand, in units of the clip range, and the same however mini-batches were cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megagspo.algo.losses import objective_of
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.schema import RewardConfig
from megagspo.measure import mismatch_metrics, objective_metrics, reward_metrics
from megagspo.stages import Update, experience
from megagspo.types import LogProbs, MiniBatch, TrainSequence
from tests.unit.stages.samples import sample

EXACT = [RewardConfig(name="exact")]


def test_samples_that_are_not_trainable_are_in_no_metric() -> None:
    samples = [
        sample(0, "g", 1.0),
        sample(1, "g", 1.0, finish="abort"),
        sample(2, "g", 0.0),
        sample(3, "g", 0.0),
        sample(4, "g", 100.0, tokens=()),
    ]
    assert reward_metrics(samples, EXACT)["reward/mean"] == pytest.approx(1 / 3)


def test_solved_groups_are_those_with_the_full_reward() -> None:
    samples = [sample(0, "a", 1.0), sample(1, "a", 1.0), sample(2, "b", 0.0), sample(3, "b", 0.5)]
    metrics = reward_metrics([*samples, sample(4, "c", 1.0), sample(5, "c", 0.0)], EXACT)
    assert metrics["reward/solve_all"] == pytest.approx(1 / 3)
    assert metrics["reward/solve_none"] == pytest.approx(1 / 3)


def mismatch(gap: float, config: AlgorithmConfig) -> dict[str, float]:
    data = experience([sample(0, "g", 1.0), sample(1, "g", 0.0, tokens=(1, 2, 3))])
    trainer = [values + gap for values in data.rollout_logprobs]
    return mismatch_metrics(replace(data, trainer_logprobs=trainer), config)


def test_mismatch_is_measured_in_units_of_the_clip_range() -> None:
    config = AlgorithmConfig()
    at_the_upper_edge = mismatch(math.log1p(4e-4), config)
    at_the_lower_edge = mismatch(math.log1p(-3e-4), config)
    # the log-probabilities are float32 numbers near 0.5, whose spacing is 6e-8: 2e-4 of the range
    assert at_the_upper_edge["mismatch/ratio_in_eps"] == pytest.approx(1.0, abs=1e-3)
    assert at_the_lower_edge["mismatch/ratio_in_eps"] == pytest.approx(-1.0, abs=1e-3)
    large = mismatch(0.5, config)
    assert large["mismatch/logprob_abs_mean"] == pytest.approx(0.5)
    assert large["mismatch/k3"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)


def test_without_a_lower_bound_the_upper_one_is_the_unit() -> None:
    config = AlgorithmConfig(name="cispo")
    assert mismatch(math.log(5), config)["mismatch/ratio_in_eps"] == pytest.approx(1.0)
    assert mismatch(-math.log(5), config)["mismatch/ratio_in_eps"] == pytest.approx(-1.0)


def test_mismatch_is_told_for_short_middle_and_long_responses() -> None:
    samples = [sample(n, "g", 1.0, tokens=(7,) * (n + 1)) for n in range(9)]
    data = experience(samples)
    off = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    trainer = [row + x for row, x in zip(data.rollout_logprobs, off, strict=True)]
    metrics = mismatch_metrics(
        replace(data, trainer_logprobs=trainer), AlgorithmConfig(name="cispo", clip_high=math.e - 1)
    )
    found = [metrics[f"mismatch/ratio_in_eps_{third}"] for third in ("short", "middle", "long")]
    assert found == pytest.approx([0.0, 1.0, 2.0], abs=1e-6)


def test_mismatch_is_absent_when_the_trainer_did_not_compute() -> None:
    data = experience([sample(0, "g", 1.0), sample(1, "g", 0.0)])
    assert mismatch_metrics(data, AlgorithmConfig()) == {}


def made(ratios: list[list[float]], advantages: list[float], reference: float | None = None) -> Update:
    """An update whose policy has these token ratios against the old one."""
    new = [torch.tensor(row).log() - 1 for row in ratios]
    batch = MiniBatch(
        sequences=[TrainSequence(id="s", token_ids=(1,) * (1 + len(row)), prompt_length=1) for row in ratios],
        token_weights=[1.0] * len(ratios),
        advantages=[torch.full((len(row),), a) for row, a in zip(ratios, advantages, strict=True)],
        old_logprobs=[torch.full((len(row),), -1.0) for row in ratios],
        ref_logprobs=None if reference is None else [row + reference for row in new],
    )
    gradient: Any = type("Gradient", (), {"logprobs": LogProbs(logprobs=new, entropies=[r * 0 for r in new])})
    return Update(batch=batch, gradient=gradient, grad_norm=0.0, learning_rate=0.0)


RATIOS = [[1.0, 1.5], [0.5, 1.0, 1.0], [1.5]]
ADVANTAGES = [1.0, -1.0, 0.0]


def test_clipping_ratios_and_advantages_by_hand() -> None:
    """Six tokens: one clipped above (1.5 at A = 1), one below (0.5 at A = -1); 1.5 at A = 0 is not."""
    config = AlgorithmConfig(name="grpo")
    metrics = objective_metrics([made(RATIOS, ADVANTAGES)], objective_of(config), config)
    assert metrics["policy/clip_fraction"] == pytest.approx(2 / 6)
    assert metrics["policy/clip_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["policy/clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["policy/clip_fraction_sequences"] == pytest.approx(2 / 3)
    assert metrics["policy/ratio_mean"] == pytest.approx(6.5 / 6)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)
    squares = 1 + 2.25 + 0.25 + 1 + 1 + 2.25
    assert metrics["policy/effective_sample_size"] == pytest.approx(6.5**2 / squares / 6)
    assert metrics["policy/log_ratio_abs_mean"] == pytest.approx((2 * math.log(1.5) + math.log(2)) / 6)
    assert metrics["advantage/zero_fraction"] == pytest.approx(1 / 6)
    assert metrics["advantage/mean"] == pytest.approx(-1 / 6)
    assert metrics["advantage/abs_max"] == 1
    # ln(1.5)/2 and ln(1.5) in units of ln(1.2), -ln(2)/3 in units of -ln(0.8)
    expected = (1.5 * math.log(1.5) / math.log(1.2) - math.log(2) / 3 / -math.log(0.8)) / 3
    assert metrics["staleness/ratio_in_eps"] == pytest.approx(expected, rel=1e-5)


def test_metrics_do_not_depend_on_how_the_mini_batches_were_made() -> None:
    config = AlgorithmConfig(name="grpo")
    whole = objective_metrics([made(RATIOS, ADVANTAGES)], objective_of(config), config)
    parts = [made([row], [a]) for row, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert objective_metrics(parts, objective_of(config), config) == pytest.approx(whole)


def test_a_clipped_sequence_ratio_clips_all_its_tokens() -> None:
    config = AlgorithmConfig()
    metrics = objective_metrics([made(RATIOS, ADVANTAGES)], objective_of(config), config)
    assert metrics["policy/clip_fraction"] == pytest.approx(5 / 6)
    assert metrics["policy/clip_fraction_sequences"] == pytest.approx(2 / 3)


def test_kl_to_the_reference_is_told_by_all_estimators() -> None:
    config = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1, "estimator": "k2"}})
    update = made(RATIOS, ADVANTAGES, reference=0.5)
    metrics = objective_metrics([update], objective_of(config), config)
    assert metrics["policy/kl_ref_k1"] == pytest.approx(-0.5)
    assert metrics["policy/kl_ref_k2"] == metrics["policy/kl_ref"] == pytest.approx(0.125)
    assert metrics["policy/kl_ref_k3"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)
    without = objective_metrics([update], objective_of(AlgorithmConfig()), AlgorithmConfig())
    assert not [name for name in without if "kl_ref" in name]
