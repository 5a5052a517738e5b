"""Sampling: uniform noise, draws that follow the distribution, top-k and top-p that keep what they should."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.rollout.embedded import sampling
from megagspo.rollout.embedded.sampling import RowSampling, draw, keep_likeliest, sample, seed_keys, uniforms
from megagspo.types import SamplingParams

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """SplitMix64's finaliser in Python integers: the independent reference."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_mix_is_splitmix64() -> None:
    # The first outputs of the published generator from state 0 and from state 1234567.
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert splitmix((1234567 + 0x9E3779B97F4A7C15) & MASK) == 6457827717110365317
    seeds = [0, 1, 2**63 - 1, 2**64 - 1, 987654321]
    for position in (0, 1, 5000):
        offset = (position + 1) * 0x9E3779B97F4A7C15
        expected = [(splitmix((splitmix(s) + offset) & MASK) >> 11) * 2.0**-53 for s in seeds]
        assert uniforms(seed_keys(seeds), position).tolist() == expected


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """|chi^2 - n| / sqrt(2 n) for n degrees of freedom: as far from what is expected as so many sigmas."""
    freedom = counts.numel() - 1
    return abs(float(((counts - expected) ** 2 / expected).sum()) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("seeds", [range(4096), random.Random(1).sample(range(2**62), 4096)])
def test_noise_is_uniform_over_seeds_and_positions_and_neighbours_are_independent(seeds: Any) -> None:
    keys = seed_keys(list(seeds))
    noise = torch.stack([uniforms(keys, t) for t in range(64)])  # [T, B]
    assert noise.min() >= 0
    assert noise.max() < 1
    even = torch.full((256,), noise.numel() / 256)
    assert chi_square(torch.histc(noise.float(), 256, 0, 1), even) < 4
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):  # next position, next seed
        cells = ((a * 16).long() * 16 + (b * 16).long()).flatten()
        assert chi_square(cells.bincount(minlength=256), torch.full((256,), a.numel() / 256)) < 4


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).repeat(6, 1)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.749, 0.751, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("vocab_size", [3, 64, 65, 500, 2048])
def test_draw_in_two_stages_is_the_draw_over_the_whole_vocabulary(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randn(4000, vocab_size, generator=generator).mul(3).softmax(-1)
    weights[torch.rand(weights.shape, generator=generator) < 0.5] = 0.0
    weights[:, 1] = weights[:, 1].clamp(min=1e-3)
    uniform = torch.rand(4000, dtype=torch.float64, generator=generator)
    cumulative = weights.double().cumsum(-1)
    expected = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
    drawn = draw(weights, uniform)
    # Sums of blocks are float32, so a threshold within 1e-7 of a step may fall on its other side.
    assert (drawn != expected).sum() <= 1
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_a_weight_of_zero_is_never_drawn_at_the_edges() -> None:
    weights = torch.zeros(2000, 200)
    weights[:, 70], weights[:, 130] = 0.1, 0.7
    uniform = torch.cat([torch.linspace(0, 1 - 2.0**-53, 1000), torch.full((1000,), 0.125)]).double()
    uniform += torch.linspace(-1e-15, 1e-15, 2000, dtype=torch.float64)
    assert set(draw(weights, uniform.clamp(0, 1 - 2.0**-53)).tolist()) == {70, 130}


def rows_of(count: int, **settings: Any) -> RowSampling:
    return RowSampling.of(
        [SamplingParams(max_new_tokens=4, **settings)] * count, list(range(count)), vocab_size=6, device=CPU
    )


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.0, -4.0])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.7}, [1, 3]),  # 0.55 + 0.22 >= 0.7
        ({"top_p": 0.5}, [1]),
        ({"top_k": 3, "top_p": 0.85}, [1, 3]),  # of the mass of the three: 0.63 + 0.26 >= 0.85
        ({"temperature": 0.0}, [1]),
    ],
)
def test_samples_follow_the_distribution_that_the_settings_leave(
    settings: dict[str, Any], kept: list[int]
) -> None:
    count = 20000
    temperature = settings.get("temperature", 1.0) or 1.0
    full = torch.log_softmax(LOGITS.double() / temperature, -1)
    left = torch.zeros(6, dtype=torch.float64)
    left[kept] = full[kept].exp()
    tokens, logprobs = sample(LOGITS.repeat(count, 1), rows_of(count, **settings), position=3)
    assert torch.allclose(logprobs.double(), full[tokens], atol=1e-6)  # before top-k and top-p
    counts = tokens.bincount(minlength=6).double()
    assert counts[left == 0].sum() == 0
    if len(kept) > 1:
        assert chi_square(counts[kept], left[kept] / left.sum() * count) < 4


def test_at_temperature_1_nothing_is_divided_and_no_limit_costs_nothing() -> None:
    rows = rows_of(2, temperature=1.0, top_p=1.0, top_k=-1)
    assert rows.temperature is rows.top_p is rows.top_k is rows.stop_ids is None


def test_rows_keep_their_own_settings_when_they_are_selected() -> None:
    settings = [
        SamplingParams(max_new_tokens=1, top_k=2, stop_token_ids=(4,)),
        SamplingParams(max_new_tokens=2, temperature=0.5, stop_token_ids=(1, 2)),
        SamplingParams(max_new_tokens=3, top_p=0.5),
    ]
    rows = RowSampling.of(settings, [11, 12, 13], vocab_size=6, device=CPU)
    together = sample(LOGITS.repeat(3, 1), rows, 0)
    for i in range(3):
        alone = sample(LOGITS[None], rows.select(torch.tensor([i])), 0)
        assert alone[0].item() == together[0][i].item()
        assert alone[1].item() == together[1][i].item()
    assert rows.is_stop(torch.tensor([4, 4, 4])).tolist() == [True, False, False]
    assert rows.is_stop(torch.tensor([1, 1, 1])).tolist() == [False, True, False]


def test_a_row_without_limits_keeps_every_token_beside_one_that_has_some() -> None:
    settings = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=1, top_p=0.5)]
    rows = RowSampling.of(settings, [1, 2], vocab_size=5000, device=CPU)
    probabilities = torch.randn(2, 5000).mul(4).softmax(-1)
    kept = keep_likeliest(probabilities, rows.top_k, rows.top_p)
    assert torch.equal(kept[0], probabilities[0])
    assert 0 < (kept[1] > 0).sum() < 5000


def test_chunks_of_rows_give_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = torch.randn(10, 6), rows_of(10, temperature=0.7)
    whole = sample(logits, rows, 2)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 18)
    parts = sample(logits, rows, 2)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("scale", [0.1, 6.0])  # flat: the shortlist does not hold the mass; peaked: it does
def test_the_shortlist_of_top_p_changes_nothing(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    probabilities = torch.randn(8, 300).mul(scale).softmax(-1)
    top_p = torch.full((8, 1), 0.8)
    whole = keep_likeliest(probabilities, None, top_p)
    monkeypatch.setattr(sampling, "SHORTLIST", 100)
    assert torch.equal(keep_likeliest(probabilities, None, top_p), whole)
    for before, after in zip(probabilities, whole, strict=True):
        kept = after[after > 0]
        assert kept.sum() >= 0.8 - 1e-6
        assert kept.sum() - kept.min() < 0.8
        assert before[after == 0].max() <= kept.min()


def test_nan_is_not_sampled_away() -> None:
    _, logprobs = sample(torch.full((2, 6), float("nan")), rows_of(2), 0)
    assert logprobs.isnan().all()
