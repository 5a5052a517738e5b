"""Trainer-rollout correction weights at every level, in every form and mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from megagspo.algo.corrections import correction_weights
from megagspo.config.algorithm import CorrectionConfig
from tests.conformance import papers

TRAINER = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
APART = [
    [0.0, 0.0, 0.0, 0.0],
    [0.1, -0.2, 0.05, 0.3],
    [0.5, 0.4, 0.6, 0.45],
    [-0.5, -0.4, -0.6, -0.45],
    [2.0, -2.0, 1.0, -1.0],
]
WAYS = [
    {"mode": mode, "level": level, "sequence_form": form, "low": 0.6, "high": 1.5}
    for mode, (level, form) in itertools.product(
        ("truncate", "mask"),
        (("token", "geometric_mean"), ("sequence", "geometric_mean"), ("sequence", "product")),
    )
]


def weights(differences: list[float], **keys: Any) -> list[float]:
    rollout = TRAINER - torch.tensor(differences, dtype=torch.float64)
    found: list[float] = correction_weights(
        TRAINER, rollout, CorrectionConfig(**keys), log_ratio_max=20.0
    ).tolist()
    return found


@pytest.mark.parametrize("how", WAYS, ids=lambda how: f"{how['mode']} {how['level']} {how['sequence_form']}")
@pytest.mark.parametrize("differences", APART)
def test_every_level_form_and_mode_is_the_transcription(how: Any, differences: list[float]) -> None:
    row = {
        "train_logprobs": TRAINER.tolist(),
        "old_logprobs": TRAINER.tolist(),
        "rollout_logprobs": (TRAINER - torch.tensor(differences, dtype=torch.float64)).tolist(),
    }
    assert weights(differences, **how) == pytest.approx(papers.corrections(how, row, 20.0), rel=1e-14)


def test_truncation_bounds_a_weight_from_above_alone() -> None:
    """TIS: min(c, high)."""
    found = weights([1.0, -3.0, 0.0, 0.1], mode="truncate", high=1.5)
    assert found == pytest.approx([1.5, math.exp(-3), 1.0, math.exp(0.1)], rel=1e-14)


def test_masking_keeps_weights_inside_the_range_as_they_are() -> None:
    """MIS, IcePop: outside it, on either side, 0."""
    found = weights([1.0, -3.0, 0.0, 0.1], mode="mask", low=0.5, high=2.0)
    assert found == pytest.approx([0.0, 0.0, 1.0, math.exp(0.1)], rel=1e-14)


def test_the_product_of_a_long_response_is_not_its_geometric_mean() -> None:
    """1000 tokens off by 0.01: the mean of the log-ratios gives 1.01, their sum 22026, which is masked."""
    trainer = torch.full((1000,), -1.0, dtype=torch.float64)
    for form, expected in (("geometric_mean", math.exp(0.01)), ("product", 0.0)):
        how = CorrectionConfig(mode="mask", level="sequence", sequence_form=form)  # type: ignore[arg-type]
        found = correction_weights(trainer, trainer - 0.01, how, log_ratio_max=20.0)
        assert found.tolist() == pytest.approx([expected] * 1000, rel=1e-12)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("x", [200.0, -200.0, math.inf, -math.inf])
def test_extreme_differences_give_finite_weights(how: Any, x: float) -> None:
    found = weights([x, 0.0, 0.0, 0.0], **how)
    assert all(math.isfinite(weight) for weight in found)


@pytest.mark.parametrize("how", WAYS)
def test_nan_stays_visible(how: Any) -> None:
    """It is outside no range."""
    found = weights([math.nan, 0.0, 0.0, 0.0], **how)
    assert math.isnan(found[0])
    assert all(map(math.isnan, found)) == (how["level"] == "sequence")


def test_weights_carry_no_gradient() -> None:
    trainer = TRAINER.clone().requires_grad_()
    how = CorrectionConfig(mode="truncate")
    assert not correction_weights(trainer, TRAINER, how, log_ratio_max=20.0).requires_grad
