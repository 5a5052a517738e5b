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
    entropy_gradients: Tensor | None = None,
    chunk_bytes: int = 1 << 20,
) -> tuple[Tensor, Tensor, Tensor]:
    """With the unit matrix as output matrix the hidden states are the logits: the ranks' gradients add up to
    that of the logits."""
    from megatron.core import parallel_state

    from megagspo.policy.logprob import token_logprobs, vocabulary_part

    group = parallel_state.get_tensor_model_parallel_group()
    hidden = logits.clone().requires_grad_()
    weight = torch.eye(logits.shape[1], dtype=logits.dtype).chunk(group.size())[group.rank()].clone()
    part = vocabulary_part(rows=len(weight), vocab_size=vocabulary, rank=group.rank(), group=group)
    values, entropies = token_logprobs(
        hidden, weight, targets, part, temperature=temperature, chunk_bytes=chunk_bytes
    )
    outputs = [values] if entropy_gradients is None else [values, entropies]
    torch.autograd.backward(outputs, [gradients, entropy_gradients][: len(outputs)])
    assert hidden.grad is not None
    return values.detach(), entropies.detach(), hidden.grad


def float64(
    logits: Tensor,
    targets: Tensor,
    gradients: Tensor,
    temperature: float,
    entropy_gradients: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    real = logits[:, :VOCABULARY].double().requires_grad_()
    log_softmax = (real / temperature).log_softmax(dim=-1)
    values = log_softmax.gather(1, targets[:, None])[:, 0]
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    of_entropy = torch.zeros_like(entropies) if entropy_gradients is None else entropy_gradients.double()
    torch.autograd.backward([values, entropies], [gradients.double(), of_entropy])
    assert real.grad is not None
    return values.detach(), entropies.detach(), real.grad


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
    whole = torch.stack([gradient for _, _, gradient in results]).sum(0)
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


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_has_a_gradient_too(ranks: RankPool, tensor: int, temperature: float) -> None:
    """Of both outputs together, as an entropy bonus wants it."""
    logits, targets, gradients = make_case(1.0)
    of_entropy = gradients.flip(0)
    _, _, expected = float64(logits, targets, gradients, temperature, of_entropy)
    results = ranks.run(
        logprobs_of_part, logits, targets, gradients, temperature, VOCABULARY, of_entropy, tensor=tensor
    )
    whole = torch.stack([gradient for _, _, gradient in results]).sum(0)
    # p (log p + H) with log p up to 3 / temperature, times gradients up to 3 / temperature.
    tolerance = 4 * torch.finfo(torch.float32).eps * (3 / temperature) ** 2
    assert float((whole[:, :VOCABULARY] - expected).abs().max()) <= tolerance


@pytest.mark.parametrize("tensor", [1, 2])
def test_results_do_not_depend_on_the_size_of_chunks(ranks: RankPool, tensor: int) -> None:
    """One token a chunk, two, all: each token's numbers come from its own row alone."""
    case = (*make_case(1.0), 1.0, VOCABULARY, None)
    row = 4 * VOCABULARY
    one, two, whole = (
        ranks.run(logprobs_of_part, *case, chunk_bytes=size, tensor=tensor)
        for size in (row, 2 * row, 1 << 20)
    )
    for results in (one, two):
        for actual, expected in zip(results, whole, strict=True):
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
