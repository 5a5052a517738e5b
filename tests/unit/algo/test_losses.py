"""The objectives against a transcription of the papers' formulas in float64, one response at a time."""

from __future__ import annotations

import math

import pytest
import torch

from megagspo.algo.losses import LOSSES
from megagspo.algo.losses.likelihood import likelihood
from megagspo.config.algorithm import AlgorithmName, between_ranges
from tests.unit.algo.batches import (
    ADVANTAGES,
    LENGTHS,
    NAMES,
    SEQUENCE_RATIOS,
    loss_and_gradient,
    make_batch,
    random_rows,
    settings,
    sides,
    transcribed,
)

GENERATOR = torch.Generator().manual_seed(7)
TOKEN_ADVANTAGES = [torch.randn(length, generator=GENERATOR).tolist() for length in LENGTHS]
WIDE = {"clip_low": 0.2, "clip_high": 0.27, "allow_wide_clip": True}


def test_every_name_has_its_objective() -> None:
    assert set(LOSSES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 0.3, 3.0])
@pytest.mark.parametrize("a_token", [False, True])
def test_loss_gradient_and_clipped_tokens_are_the_papers(
    name: AlgorithmName, scale: float, a_token: bool
) -> None:
    """In float64, where both compute the same number to rounding; with an advantage a response or a token."""
    advantages = TOKEN_ADVANTAGES if a_token and name != "gspo" else ADVANTAGES
    config, rows = settings(name), random_rows(scale)
    expected, gradient, clipped = transcribed(config, *rows, advantages)
    batch = make_batch(*rows, advantages, dtype=torch.float64)
    loss, actual, terms = loss_and_gradient(batch, config)
    assert loss == pytest.approx(expected, rel=1e-11, abs=1e-13)
    assert actual.tolist() == pytest.approx(gradient, rel=1e-11, abs=1e-13)
    assert [bool(side) for side in sides(terms)] == clipped


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.3])
def test_float32_gives_the_papers_values_to_its_rounding(name: AlgorithmName, scale: float) -> None:
    config, rows = settings(name), random_rows(scale)
    expected, gradient, clipped = transcribed(config, *rows, ADVANTAGES)
    loss, actual, terms = loss_and_gradient(make_batch(*rows, ADVANTAGES), config)
    # Log-probabilities are of the order of 3: a difference carries a few float32 roundings of 3, about
    # 1e-6, into the ratio; CISPO's loss is that times a log-probability.
    assert loss == pytest.approx(expected, abs=2e-6 if name != "cispo" else 2e-5)
    assert actual.tolist() == pytest.approx(gradient, abs=2e-6)
    assert [bool(side) for side in sides(terms)] == clipped


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cispo"])
def test_both_sides_are_clipped_in_the_comparisons_above(name: AlgorithmName) -> None:
    seen: set[int] = set()
    for scale in (1e-4, 1e-3, 0.3):
        _, _, terms = loss_and_gradient(make_batch(*random_rows(scale), ADVANTAGES), settings(name))
        seen |= set(sides(terms))
    assert seen == {-1, 0, 1}


@pytest.mark.parametrize("name", ["grpo", "gspo_token", "hybrid", "dapo"])
@pytest.mark.parametrize("dual_clip", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_dual_clip_is_the_papers(name: AlgorithmName, dual_clip: float, scale: float) -> None:
    """arXiv 1912.09729, eq. 5: for A < 0 the objective is at least c A; a ratio that is bounded inside the
    range (c = 1.1) is not counted as clipped."""
    config = settings(name, dual_clip=dual_clip, **WIDE)
    rows = random_rows(scale)
    expected, gradient, clipped = transcribed(config, *rows, ADVANTAGES)
    loss, actual, terms = loss_and_gradient(make_batch(*rows, ADVANTAGES, dtype=torch.float64), config)
    assert loss == pytest.approx(expected, rel=1e-11)
    assert actual.tolist() == pytest.approx(gradient, rel=1e-11, abs=1e-13)
    assert [bool(side) for side in sides(terms)] == clipped


def test_dual_clip_bounds_what_a_large_ratio_costs() -> None:
    train, old = [torch.tensor([-1.0])], [torch.tensor([-6.0])]
    free, _, _ = loss_and_gradient(make_batch(train, old, [-2.0]), settings("grpo"))
    loss, gradient, terms = loss_and_gradient(make_batch(train, old, [-2.0]), settings("grpo", dual_clip=3.0))
    assert free == pytest.approx(2 * math.exp(5), rel=1e-6)
    assert loss == pytest.approx(6.0)
    assert gradient.tolist() == [0.0]
    assert sides(terms) == [1]


@pytest.mark.parametrize("scale", [1e-3, 0.3])
@pytest.mark.parametrize(
    ("weight", "end"), [(1.0, "gspo_token"), (0.0, "grpo")], ids=["sequence end", "token end"]
)
def test_the_ends_of_hybrid_are_gspo_token_and_grpo(scale: float, weight: float, end: AlgorithmName) -> None:
    """Bit by bit, default ranges included: a = 1 and a = 0."""
    rows = random_rows(scale)
    blend, pure = settings("hybrid", hybrid_weight=weight), settings(end)
    assert (blend.clip_low, blend.clip_high) == (pure.clip_low, pure.clip_high)
    loss, gradient, terms = loss_and_gradient(make_batch(*rows, TOKEN_ADVANTAGES), blend)
    expected, slopes, others = loss_and_gradient(make_batch(*rows, TOKEN_ADVANTAGES), pure)
    assert loss == expected
    assert torch.equal(gradient, slopes)
    assert sides(terms) == sides(others)


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_the_default_range_of_hybrid_lies_between_in_the_log(weight: float) -> None:
    low, high = between_ranges(weight)
    assert math.log1p(high) == pytest.approx(weight * math.log1p(4e-4) + (1 - weight) * math.log1p(0.2))
    assert math.log1p(-low) == pytest.approx(weight * math.log1p(-3e-4) + (1 - weight) * math.log1p(-0.2))
    config = settings("hybrid", hybrid_weight=weight)
    assert (config.clip_low, config.clip_high) == (low, high)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 0.3])
@pytest.mark.parametrize("wide", [False, True])
def test_gspo_token_is_gspo_where_advantages_are_alike(scale: float, wide: bool) -> None:
    """arXiv 2507.18071, section 4.3: the same value, gradient and clipped tokens."""
    keys = WIDE if wide else {}
    rows = random_rows(scale)
    results = [
        loss_and_gradient(make_batch(*rows, ADVANTAGES, dtype=torch.float64), settings(name, **keys))
        for name in ("gspo", "gspo_token")
    ]
    (loss, gradient, terms), (other, slopes, others) = results
    assert loss == pytest.approx(other, rel=1e-12)
    assert gradient.tolist() == pytest.approx(slopes.tolist(), rel=1e-12, abs=1e-15)
    assert sides(terms) == sides(others)


@pytest.mark.parametrize("name", SEQUENCE_RATIOS)
def test_every_token_of_a_response_has_the_same_gradient_weight(name: AlgorithmName) -> None:
    """GSPO, eq. 10: s_i A_i / |y_i| / N, whatever the token's own ratio."""
    train, old = random_rows(1.0)
    config = settings(name, clip_low=0.999, clip_high=1e6, allow_wide_clip=True)
    _, gradient, _ = loss_and_gradient(make_batch(train, old, ADVANTAGES), config)
    for slopes, new, before, advantage in zip(gradient.split(LENGTHS), train, old, ADVANTAGES, strict=True):
        assert bool((slopes == slopes[0]).all())
        ratio = (new.double() - before.double()).mean().exp().item()
        expected = -ratio * advantage / len(new) / len(LENGTHS)
        assert slopes[0].item() == pytest.approx(expected, rel=3e-6)  # as above, relative to the ratio


def test_a_ratio_finer_than_the_log_probabilities_survives() -> None:
    """float32 numbers near 1000 are 6.1e-5 apart; one of four tokens is off by that much, and the mean by a
    quarter of it. l + mean - l would round it away, (l - l) + mean does not."""
    train = torch.full((4,), -1000.0)
    old = train.clone()
    old[0] = torch.nextafter(old[0], torch.tensor(-math.inf))
    terms = LOSSES["gspo_token"](settings("gspo_token"))(make_batch([train], [old], [1.0]))
    assert terms.ratio.tolist() == pytest.approx([math.exp(2**-14 / 4)] * 4, abs=6e-8)  # float32 near 1


def test_cispo_passes_every_token_a_gradient_of_bounded_weight() -> None:
    """arXiv 2506.13585: the weight is cut at 1 + clip_high and never raised; the gradient is that of the
    log-likelihood, also for a token that is cut."""
    log_ratios = torch.tensor([-3.0, 0.0, 1.0, 3.0])
    train = [torch.full((4,), -2.0)]
    batch = make_batch(train, [train[0] - log_ratios], [[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    _, gradient, terms = loss_and_gradient(batch, settings("cispo"))
    weights = [math.exp(-3), 1.0, math.e, 5.0]
    expected = [-w * a / 4 for w, a in zip(weights, (1, -1, 1, -1), strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)  # the log-ratios are float32 numbers
    assert sides(terms) == [0, 0, 0, 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["train", "old", "advantages"])
def test_nan_stays_visible(name: AlgorithmName, side: str) -> None:
    rows = {"train": torch.tensor([-1.0, -2.0]), "old": torch.tensor([-1.0, -2.0])}
    advantage = math.nan if side == "advantages" else 1.0
    if side != "advantages":
        rows[side][1] = math.nan
    batch = make_batch([rows["train"]], [rows["old"]], [advantage])
    loss, _, _ = loss_and_gradient(batch, settings(name))
    assert math.isnan(loss)


def test_likelihood_is_the_mean_negative_log_probability() -> None:
    train, old = random_rows(1.0)
    config = settings("grpo", aggregation="token_mean")
    loss, gradient, terms = loss_and_gradient(make_batch(train, old, ADVANTAGES), config, likelihood)
    assert loss == pytest.approx(-torch.cat(train).double().mean().item(), rel=1e-6)
    assert gradient.tolist() == pytest.approx([-1 / sum(LENGTHS)] * sum(LENGTHS))
    assert not any(sides(terms))
