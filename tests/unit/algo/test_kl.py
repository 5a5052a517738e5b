"""Estimates of KL(policy || reference), against the distribution's own KL and at any distance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megagspo.algo.kl import ESTIMATORS, kl_estimate
from megagspo.config.algorithm import Estimator

GENERATOR = torch.Generator().manual_seed(0)
P, Q = (torch.randn(7, generator=GENERATOR, dtype=torch.float64).log_softmax(0) for _ in range(2))


def estimate(new: Tensor, ref: Tensor, estimator: Estimator, most: float = 20.0) -> Tensor:
    return kl_estimate(new, ref, estimator=estimator, log_ratio_max=most)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_its_mean_over_samples_of_the_policy_is_the_kl(estimator: Estimator) -> None:
    """Exactly: the mean is a sum over the vocabulary. k2 is biased, and meets it to second order."""
    kl = (P.exp() * (P - Q)).sum()
    assert (P.exp() * estimate(P, Q, estimator)).sum().item() == pytest.approx(kl.item(), rel=1e-12)


def test_k2_meets_the_kl_to_second_order() -> None:
    near = (P + 1e-3 * Q).log_softmax(0)
    kl = (P.exp() * (P - near)).sum().item()
    # third order: the log-ratios are about 1e-3
    assert (P.exp() * estimate(P, near, "k2")).sum().item() == pytest.approx(kl, rel=5e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_it_is_zero_where_the_policies_agree_and_positive_elsewhere(estimator: Estimator) -> None:
    assert estimate(P, P, estimator).tolist() == [0.0] * 7
    assert bool((estimate(P, Q, estimator) > 0).all())


def test_expected_gradients_on_samples_of_the_policy() -> None:
    """k2's is that of the KL itself, k1's is zero: in the loss it holds the policy nowhere (the guard warns).
    The gradient is taken of samples' log-probabilities, the sampling held still."""
    logits = P.clone().requires_grad_()
    new = logits.log_softmax(0)
    weights = new.detach().exp()
    (right,) = torch.autograd.grad((new.exp() * (new - Q)).sum(), logits, retain_graph=True)
    for estimator, expected in (("k2", right), ("k1", torch.zeros_like(right))):
        (found,) = torch.autograd.grad(
            (weights * estimate(new, Q, estimator)).sum(),  # type: ignore[arg-type]
            logits,
            retain_graph=True,
        )
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("x", [-2.0, -1e-3, 0.0, 1e-3, 2.0])
def test_values_and_slopes_are_the_formulas(x: float) -> None:
    """x = l_ref - l: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, by l: 1, -x, 1 - exp(x)."""
    expected = {"k1": (-x, 1.0), "k2": (x * x / 2, -x), "k3": (math.expm1(x) - x, -math.expm1(x))}
    for estimator, (value, slope) in expected.items():
        new = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
        found = estimate(new, torch.tensor(-3.0 + x, dtype=torch.float64), estimator)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(found, new)
        # the difference of numbers near 3 carries their rounding
        assert found.item() == pytest.approx(value, abs=2e-15, rel=1e-12)
        assert gradient.item() == pytest.approx(slope, abs=2e-15, rel=1e-12)


@pytest.mark.parametrize("x", [200.0, -200.0, 1e30, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_clamped_before_exp(x: float, dtype: torch.dtype) -> None:
    """So that value AND gradient are finite: clamped after it, 0 times infinity would be NaN."""
    new = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    value = estimate(new, new.detach() + x, "k3")
    (gradient,) = torch.autograd.grad(value.sum(), new)
    edge = math.copysign(20.0, x)
    assert value.item() == pytest.approx(math.expm1(edge) - edge, rel=1e-6)
    assert gradient.item() == 0


def test_k3_of_a_policy_that_left_its_reference() -> None:
    """A8: policy -100, reference 0, float32. The gradient is 0, not NaN. There a cap of 10 was put on the
    estimate; here it is put on the log-ratio, so that the value is exp(10) - 11."""
    new = torch.tensor([-100.0], requires_grad=True)
    value = estimate(new, torch.zeros(1), "k3", most=10.0)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    assert value.item() == pytest.approx(math.exp(10) - 11, rel=1e-6)
    assert gradient.item() == 0


@pytest.mark.parametrize("estimator", ["k1", "k2"])
@pytest.mark.parametrize("x", [200.0, -200.0])
def test_the_others_need_no_clamp(estimator: Estimator, x: float) -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    value = estimate(new, new.detach() + x, estimator)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    assert value.item() == (-x if estimator == "k1" else x * x / 2)
    assert gradient.item() == (1.0 if estimator == "k1" else -x)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("side", [0, 1])
def test_nan_stays_visible(estimator: Estimator, side: int) -> None:
    values = [torch.zeros(2), torch.zeros(2)]
    values[side][1] = math.nan
    assert estimate(values[0], values[1], estimator).isnan().tolist() == [False, True]
