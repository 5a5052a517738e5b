"""Drawing tokens from logits: pure functions over a batch, each row with its own seed and settings.

The noise of a row depends on its seed and on the position of the token alone, never on the other rows: equal
requests give equal samples whatever they are batched with (but for logits so near a tie that the rounding of
a batched product decides).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.types import SamplingParams

# Rows are sampled in chunks of so many logits, to bound the memory that a large vocabulary takes.
CHUNK_ELEMENTS = 1 << 24
# Tokens in a block of the two-stage draw.
BLOCK = 64
# top-p looks among so many of the likeliest tokens first.
SHORTLIST = 1024


def _signed(value: int) -> int:
    """The int64 that has the bits of `value` modulo 2^64: torch has no unsigned arithmetic."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's own copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): one bit in changes each bit out half of the time."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def seed_keys(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """One key a seed, [B] int64. Mixed once more, so that neighbouring seeds give unrelated streams."""
    return _mix(torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device))


def uniforms(keys: Tensor, position: int) -> Tensor:
    """SplitMix64's output at this position of each key [B], as a number in [0, 1): [B] float64, 53 bits."""
    bits = _mix(keys + _signed((position + 1) * _GOLDEN))
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


@dataclass(frozen=True)
class RowSampling:
    """The settings of each row of a batch. A field is None where no row needs it, which spares the work."""

    keys: Tensor  # [B] int64
    temperature: Tensor | None  # [B, 1] float32
    top_k: Tensor | None  # [B, 1] int64, 1..V
    top_p: Tensor | None  # [B, 1] float32
    stop_ids: Tensor | None  # [B, S] int64, short rows filled with -1
    max_new_tokens: Tensor  # [B] int64

    @classmethod
    def of(
        cls,
        settings: Sequence[SamplingParams],
        seeds: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> RowSampling:
        """Temperature 0 is greedy: the likeliest token, with its log-probability at temperature 1."""
        temperature = [s.temperature or 1.0 for s in settings]
        top_k = [
            1 if s.temperature == 0 else vocab_size if s.top_k < 0 else min(s.top_k, vocab_size)
            for s in settings
        ]
        top_p = [s.top_p if s.top_p < 1 else math.inf for s in settings]  # a sum may round to above 1
        stop_width = max(len(s.stop_token_ids) for s in settings)
        stop_ids = [[*s.stop_token_ids, *[-1] * (stop_width - len(s.stop_token_ids))] for s in settings]

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            keys=seed_keys(seeds, device),
            temperature=column(temperature, 1.0, torch.float32),
            top_k=column(top_k, vocab_size, torch.int64),
            top_p=column(top_p, math.inf, torch.float32),
            stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device) if stop_width else None,
            max_new_tokens=torch.tensor([s.max_new_tokens for s in settings], device=device),
        )

    def select(self, rows: Tensor | slice) -> RowSampling:
        """The settings of some of the rows."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return RowSampling(
            keys=self.keys[rows],
            temperature=pick(self.temperature),
            top_k=pick(self.top_k),
            top_p=pick(self.top_p),
            stop_ids=pick(self.stop_ids),
            max_new_tokens=self.max_new_tokens[rows],
        )

    def is_stop(self, tokens: Tensor) -> Tensor:
        """Which of the tokens [B] end their row, [B] bool."""
        if self.stop_ids is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return (tokens[:, None] == self.stop_ids).any(dim=1)


def log_probabilities(logits: Tensor, temperature: Tensor | float | None) -> Tensor:
    """log softmax(logits / temperature) over the last axis in float32, nats; None divides by nothing."""
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def _likeliest(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest probabilities [B, n], as many as top-k and top-p may keep, descending; and their tokens."""
    if top_k is not None:
        return probabilities.topk(int(top_k.max()), dim=-1)
    if top_p is not None and probabilities.shape[-1] > SHORTLIST:
        values, tokens = probabilities.topk(SHORTLIST, dim=-1)
        if bool((values.sum(dim=-1, keepdim=True) > top_p).all()):
            return values, tokens  # spares the sort of the whole vocabulary, which takes ten times as long
    return probabilities.sort(dim=-1, descending=True)


def keep_likeliest(probabilities: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """`probabilities` [B, V] with 0 for whatever top-k or top-p leave out; not normalised again.

    top-p keeps the shortest run of likeliest tokens, among those that top-k left, that holds top_p of their
    mass.
    """
    if top_k is None and top_p is None:
        return probabilities
    values, tokens = _likeliest(probabilities, top_k, top_p)  # [B, n]
    if top_k is not None:
        values = values.masked_fill(torch.arange(values.shape[1], device=values.device) >= top_k, 0.0)
    if top_p is not None:
        cumulative = values.cumsum(dim=-1, dtype=torch.float64)
        mass = cumulative[:, -1:] if top_k is not None else 1.0
        outside = cumulative - values >= top_p * mass  # the likelier ones hold top_p without it
        outside[:, 0] = False
        values = values.masked_fill(outside, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, values)


def _pass(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The index [B, 1] at which the cumulative sum of `weights` [B, N] passes target, and what is left of it.

    A target that rounding brought below 0 or up to the whole sum is taken back: weight 0 is never chosen.
    """
    cumulative = weights.cumsum(dim=-1)  # [B, N] float64
    total = cumulative[:, -1:]
    target = torch.minimum(target.clamp(min=0), torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    index = index.clamp(max=weights.shape[1] - 1)  # NaN finds no place, and is seen in the log-probability
    return index, target - (cumulative.gather(1, index) - weights.gather(1, index))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index i of `weights` [B, V] with probability weights[i] / sum, decided by uniform [B]; [B] int64.

    Inverse CDF in two stages: a block of tokens, then one of its tokens. So only the few sums of blocks and
    one block are accumulated in float64, not the whole vocabulary, which would take longer than the softmax.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK))  # [B, N, BLOCK]
    masses = blocks.sum(dim=-1).double()  # [B, N]
    block, rest = _pass(masses, uniform[:, None] * masses.sum(dim=-1, keepdim=True))
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].double()  # [B, BLOCK]
    index, _ = _pass(inside, rest)
    return (block * BLOCK + index).squeeze(1).clamp(max=weights.shape[1] - 1)


def sample(logits: Tensor, rows: RowSampling, position: int) -> tuple[Tensor, Tensor]:
    """Draws token number `position` of each response from logits [B, V].

    Returns the tokens [B] int64 and their log-probabilities [B] float32 under softmax(logits / temperature),
    that is before top-k and top-p.
    """
    chunk = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    if len(logits) > chunk:
        parts = [
            sample(logits[start : start + chunk], rows.select(slice(start, start + chunk)), position)
            for start in range(0, len(logits), chunk)
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])
    logprobs = log_probabilities(logits, rows.temperature)
    weights = keep_likeliest(logprobs.exp(), rows.top_k, rows.top_p)
    tokens = draw(weights, uniforms(rows.keys, position))
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
