"""Log-probabilities from a vocabulary that is cut over ranks, against torch.log_softmax of the whole row
in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import RankPool

COLUMNS = 16
"""The padded vocabulary: 4 columns a rank on four ranks, of which the last has nothing but padding for 10
tokens."""
VOCABULARY = 10
ROWS = 7


def make_case(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with padding columns that would win every softmax, every token as a target, and gradients."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, COLUMNS, generator=generator) * scale
    logits[:, VOCABULARY:] = 1e4
    targets = torch.tensor([0, 3, 4, 7, 8, 9, 9])
    return logits, targets, torch.randn(ROWS, generator=generator)


def logprobs_of_part(
    layout: Any,
    platform: Any,
    logits: Tensor,
    targets: Tensor,
    gradients: Tensor,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from megatron.core import parallel_state

    from megagspo.policy.logprob import token_logprobs, vocabulary_part

    group = parallel_state.get_tensor_model_parallel_group()
    mine = logits.chunk(group.size(), dim=1)[group.rank()].clone().requires_grad_()
    part = vocabulary_part(columns=mine.shape[1], vocab_size=vocabulary, rank=group.rank(), group=group)
    values, entropies = token_logprobs(mine, targets, part, temperature=temperature)
    values.backward(gradients)
    assert mine.grad is not None
    assert not entropies.requires_grad
    return values.detach(), entropies, mine.grad


def float64(
    logits: Tensor, targets: Tensor, gradients: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    real = logits[:, :VOCABULARY].double().requires_grad_()
    log_softmax = (real / temperature).log_softmax(dim=-1)
    values = log_softmax.gather(1, targets[:, None])[:, 0]
    values.backward(gradients.double())
    assert real.grad is not None
    return values.detach(), -(log_softmax.exp() * log_softmax).sum(-1).detach(), real.grad


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_values_entropies_and_gradients_equal_log_softmax(
    ranks: RankPool, tensor: int, temperature: float, scale: float
) -> None:
    case = make_case(scale)
    values, entropies, gradients = float64(*case, temperature)
    results = ranks.run(logprobs_of_part, *case, temperature, VOCABULARY, tensor=tensor)
    # One log-sum-exp and one subtraction in float32, of numbers up to 3 * scale / temperature.
    tolerance = 4 * torch.finfo(torch.float32).eps * max(1.0, 3 * scale / temperature)
    for actual, actual_entropies, _ in results:
        assert float((actual - values).abs().max()) <= tolerance
        assert float((actual_entropies - entropies).abs().max()) <= tolerance
    whole = torch.cat([gradient for _, _, gradient in results], dim=1)
    # A probability's relative error is that of its logarithm, and the slope is gradient / temperature, up
    # to 3 / temperature.
    assert float((whole[:, :VOCABULARY] - gradients).abs().max()) <= 3 / temperature * tolerance
    assert torch.equal(whole[:, VOCABULARY:], torch.zeros(ROWS, COLUMNS - VOCABULARY))


@pytest.mark.parametrize("tensor", [1, 2])
def test_temperature_is_applied_before_the_softmax(ranks: RankPool, tensor: int) -> None:
    """A15: logits 2, 0 at temperature 0.5."""
    logits, one = torch.tensor([[2.0, 0.0]]), torch.ones(1)
    for values, _, _ in ranks.run(logprobs_of_part, logits, torch.tensor([0]), one, 0.5, 2, tensor=tensor):
        assert float(values) == pytest.approx(-0.01815, abs=5e-6)  # the value is given to that many digits
    for values, _, _ in ranks.run(logprobs_of_part, logits, torch.tensor([0]), one, 1.0, 2, tensor=tensor):
        assert float(values) == pytest.approx(-0.12693, abs=5e-6)


def test_gradient_of_bfloat16_logits_is_rounded_once(ranks: RankPool) -> None:
    """Of a token that is nearly certain the gradient 1 - p is a small difference: it is taken in float32,
    and each entry of the result is the nearest bfloat16 number, within half a unit in its last place
    (2^-9 of its size)."""
    logits, targets, gradients = make_case(1.0)
    logits[range(ROWS), targets] = 9.0
    logits = logits.bfloat16()
    _, _, expected = float64(logits, targets, gradients, 1.0)
    ((_, _, actual),) = ranks.run(logprobs_of_part, logits, targets, gradients, 1.0, VOCABULARY)
    assert actual.dtype == torch.bfloat16
    error = (actual[:, :VOCABULARY].double() - expected).abs()
    # 1e-6: the float32 roundings of 1 and p before their difference is taken.
    assert bool((error <= expected.abs() * 2**-9 + 1e-6).all())


def test_nan_in_a_row_stays_in_that_row(ranks: RankPool) -> None:
    logits, targets, gradients = make_case(1.0)
    logits[2, 5] = torch.nan
    for values, entropies, _ in ranks.run(
        logprobs_of_part, logits, targets, gradients, 1.0, VOCABULARY, tensor=2
    ):
        for result in (values, entropies):
            assert torch.equal(result.isnan(), torch.arange(ROWS) == 2)
