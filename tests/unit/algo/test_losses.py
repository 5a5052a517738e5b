"""The objectives against a transcription of the papers' formulas in float64, one response at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.algo.aggregation import sequence_mean, token_mean
from megagspo.algo.losses import LOSSES
from megagspo.algo.losses.likelihood import likelihood
from megagspo.algo.objective import Terms, TokenBatch
from megagspo.algo.segments import Segments

LENGTHS = [1, 2, 8, 5, 13, 3]
RANGES = {"gspo": (3e-4, 4e-4), "grpo": (0.2, 0.27)}


def make_batch(
    lengths: Sequence[int], train: Sequence[Tensor], old: Sequence[Tensor], advantages: Sequence[float]
) -> TokenBatch:
    segments = Segments.of(lengths)
    return TokenBatch(
        train_logprobs=torch.cat(list(train)).float().requires_grad_(),
        old_logprobs=torch.cat(list(old)).float(),
        advantages=segments.spread(torch.tensor(advantages)),
        segments=segments,
    )


def random_responses(scale: float, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """float32 numbers, so that what float64 computes from them has the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    train = [torch.randn(length, generator=generator) - 3 for length in LENGTHS]
    old = [tensor - scale * torch.randn(len(tensor), generator=generator) for tensor in train]
    return train, old, [1.5, -0.5, 0.7, -2.0, 0.3, -1.0]


def loss_and_gradient(
    objective: Any, batch: TokenBatch, weights: Sequence[float]
) -> tuple[float, Tensor, Terms]:
    terms = objective(batch)
    loss = (batch.segments.spread(torch.tensor(weights)) * terms.loss).sum()
    loss.backward()
    assert batch.train_logprobs.grad is not None
    return loss.item(), batch.train_logprobs.grad, terms


def paper_gspo(
    train: list[Tensor], old: list[Tensor], advantages: list[float], low: float, high: float
) -> tuple[float, list[list[float]], list[list[int]]]:
    """Eq. 5 to 7: J = mean_i min(s_i A_i, clip(s_i) A_i), with its derivative (eq. 10) and the side each
    token is clipped on."""
    loss, gradient, clipped = 0.0, [], []
    for new, before, advantage in zip(train, old, advantages, strict=True):
        size = len(new)
        ratio = math.exp(sum((new.double() - before.double()).tolist()) / size)
        kept = min(max(ratio, 1 - low), 1 + high)
        loss -= min(ratio * advantage, kept * advantage) / len(train)
        side = 1 if ratio > 1 + high and advantage > 0 else -1 if ratio < 1 - low and advantage < 0 else 0
        gradient.append([0.0 if side else -ratio * advantage / size / len(train)] * size)
        clipped.append([side] * size)
    return loss, gradient, clipped


def paper_grpo(
    train: list[Tensor], old: list[Tensor], advantages: list[float], low: float, high: float
) -> tuple[float, list[list[float]], list[list[int]]]:
    """Eq. 3 without KL: mean over each response's tokens, then over responses."""
    loss, gradient, clipped = 0.0, [], []
    for new, before, advantage in zip(train, old, advantages, strict=True):
        size, slopes, sides = len(new), [], []
        for difference in (new.double() - before.double()).tolist():
            ratio = math.exp(difference)
            kept = min(max(ratio, 1 - low), 1 + high)
            loss -= min(ratio * advantage, kept * advantage) / size / len(train)
            side = 1 if ratio > 1 + high and advantage > 0 else -1 if ratio < 1 - low and advantage < 0 else 0
            slopes.append(0.0 if side else -ratio * advantage / size / len(train))
            sides.append(side)
        gradient.append(slopes)
        clipped.append(sides)
    return loss, gradient, clipped


PAPER: dict[str, Callable[..., Any]] = {"gspo": paper_gspo, "grpo": paper_grpo}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.3])
def test_loss_gradient_and_clipped_tokens_are_the_papers(name: str, scale: float) -> None:
    low, high = RANGES[name]
    train, old, advantages = random_responses(scale)
    expected, gradient, clipped = PAPER[name](train, old, advantages, low, high)
    batch = make_batch(LENGTHS, train, old, advantages)
    objective = LOSSES[name](clip_low=low, clip_high=high, log_ratio_max=20.0)
    loss, actual, terms = loss_and_gradient(objective, batch, sequence_mean(LENGTHS))
    # Log-probabilities are of the order of 3: a difference carries a few float32 roundings of 3, about
    # 1e-6, into the ratio.
    assert loss == pytest.approx(expected, abs=2e-6)
    flat = [slope for slopes in gradient for slope in slopes]
    assert actual.tolist() == pytest.approx(flat, abs=2e-6)
    sides = [side for all_sides in clipped for side in all_sides]
    assert (terms.clipped_high.int() - terms.clipped_low.int()).tolist() == sides


@pytest.mark.parametrize("name", LOSSES)
def test_both_sides_are_clipped_in_the_comparison_above(name: str) -> None:
    low, high = RANGES[name]
    sides: set[int] = set()
    for scale in (1e-4, 1e-3, 0.3):
        _, _, clipped = PAPER[name](*random_responses(scale), low, high)
        sides |= {side for all_sides in clipped for side in all_sides}
    assert sides == {-1, 0, 1}


def test_every_token_of_a_response_has_the_same_gradient_weight() -> None:
    """GSPO, eq. 10: s_i A_i / |y_i| / N, whatever the token's own ratio."""
    train, old, advantages = random_responses(1.0)
    batch = make_batch(LENGTHS, train, old, advantages)
    objective = LOSSES["gspo"](clip_low=0.999, clip_high=1e6, log_ratio_max=20.0)
    _, gradient, _ = loss_and_gradient(objective, batch, sequence_mean(LENGTHS))
    for slopes, new, before, advantage in zip(gradient.split(LENGTHS), train, old, advantages, strict=True):
        assert bool((slopes == slopes[0]).all())
        ratio = (new.double() - before.double()).mean().exp().item()
        expected = -ratio * advantage / len(new) / len(LENGTHS)
        assert slopes[0].item() == pytest.approx(expected, rel=3e-6)  # as above, relative to the ratio


def test_long_answers_do_not_weigh_more() -> None:
    """A6: answers of 2 and 8 tokens, ratio 1, advantages +1 and -1."""
    logprobs = [torch.full((2,), -1.0), torch.full((8,), -1.0)]
    batch = make_batch([2, 8], logprobs, logprobs, [1.0, -1.0])
    objective = LOSSES["gspo"](clip_low=3e-4, clip_high=4e-4, log_ratio_max=20.0)
    loss, _, _ = loss_and_gradient(objective, batch, sequence_mean([2, 8]))
    assert loss == pytest.approx(0, abs=1e-7)  # one float32 rounding of 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_give_finite_loss_and_gradient(
    name: str, log_ratio: float, advantage: float
) -> None:
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    old = [train[0] - log_ratio, train[1]]
    batch = make_batch([2, 1], train, old, [advantage, advantage])
    objective = LOSSES[name](clip_low=0.2, clip_high=0.2, log_ratio_max=20.0)
    loss, gradient, terms = loss_and_gradient(objective, batch, sequence_mean([2, 1]))
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    assert bool(terms.ratio.isfinite().all())
    # The other response has ratio 1 and is not touched by its neighbour.
    assert gradient[2].item() == pytest.approx(-advantage / 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("side", ["train", "old"])
def test_nan_stays_visible(name: str, side: str) -> None:
    values = {"train": [torch.tensor([-1.0, -2.0])], "old": [torch.tensor([-1.0, -2.0])]}
    values[side][0][1] = math.nan
    batch = make_batch([2], values["train"], values["old"], [1.0])
    loss, _, _ = loss_and_gradient(
        LOSSES[name](clip_low=0.2, clip_high=0.2, log_ratio_max=20.0), batch, sequence_mean([2])
    )
    assert math.isnan(loss)


def test_likelihood_is_the_mean_negative_log_probability() -> None:
    train, old, advantages = random_responses(1.0)
    batch = make_batch(LENGTHS, train, old, advantages)
    loss, gradient, terms = loss_and_gradient(likelihood, batch, token_mean(LENGTHS))
    assert loss == pytest.approx(-torch.cat(train).double().mean().item(), rel=1e-6)
    assert gradient.tolist() == pytest.approx([-1 / sum(LENGTHS)] * sum(LENGTHS))
    assert not bool((terms.clipped_low | terms.clipped_high).any())
