"""RMSNorm against its formula in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megagspo.model.norm import RMSNorm


def make_norm(hidden: int, *, sequence_parallel: bool = False, eps: float = 1e-6) -> RMSNorm:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=sequence_parallel)
    norm = RMSNorm(config, hidden, eps=eps)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_output_and_gradient_are_the_formulas(scale: float, eps: float) -> None:
    norm = make_norm(64, eps=eps)
    x = (torch.randn(5, 3, 64) * scale).requires_grad_()
    slopes = torch.randn(5, 3, 64)
    exact = x.detach().double().requires_grad_()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.detach().double()
    (gradient,) = torch.autograd.grad(norm(x), x, slopes)
    (expected_gradient,) = torch.autograd.grad(expected, exact, slopes.double())
    # Relative to the numbers' own size, some roundings of float32 (6e-8) in a mean of 64 squares.
    assert float((norm(x) - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    assert float((gradient - expected_gradient).abs().max()) < 1e-6 * float(expected_gradient.abs().max())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_weight_carries_the_mark_that_sums_its_gradient_over_tensor_ranks(sequence_parallel: bool) -> None:
    norm = make_norm(8, sequence_parallel=sequence_parallel)
    assert norm.weight.sequence_parallel is sequence_parallel  # type: ignore[attr-defined]
