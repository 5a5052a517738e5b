"""One forward pass over whole sequences: their log-probabilities, and which experts they reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megagspo.rollout.embedded.model import LanguageModel
from megagspo.rollout.embedded.sampling import CHUNK_ELEMENTS, log_probabilities


def _padded_batches(
    sequences: Sequence[Sequence[int]], max_batch_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of like length, padded on the right: which sequences they hold, and their tokens [B, T]."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    start = 0
    while start < len(order):
        width = len(sequences[order[start]])
        chosen = order[start : start + max(1, max_batch_tokens // width)]
        padded = [[*sequences[i], *[0] * (width - len(sequences[i]))] for i in chosen]
        yield chosen, torch.tensor(padded, device=device)
        start += len(chosen)


@torch.inference_mode()
def score_sequences(
    model: LanguageModel, sequences: Sequence[Sequence[int]], temperature: float, *, max_batch_tokens: int
) -> list[list[float]]:
    """Log-probabilities of tokens 1.. of each sequence, in nats, in the order of the sequences."""
    scores: list[list[float]] = [[] for _ in sequences]
    rows = max(1, CHUNK_ELEMENTS // model.vocab_size)  # logits are made for so many tokens at once
    scaled = None if temperature == 1.0 else temperature
    for chosen, token_ids in _padded_batches(sequences, max_batch_tokens, model.device):
        hidden = model.hidden(token_ids)[:, :-1].flatten(0, 1)  # [B * (T - 1), D]
        targets = token_ids[:, 1:].flatten()
        parts = [
            log_probabilities(model.logits(h), scaled).gather(1, t[:, None]).squeeze(1)
            for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs = torch.cat(parts).view(len(chosen), -1).tolist()
        for i, row in zip(chosen, logprobs, strict=True):
            scores[i] = row[: len(sequences[i]) - 1]
    return scores


@torch.inference_mode()
def experts_hit(model: LanguageModel, sequences: Sequence[Sequence[int]], *, max_batch_tokens: int) -> Tensor:
    """Which experts of each MoE layer were chosen for any of these tokens, [L, E] bool on the host."""
    layers = model.experts()
    hit = torch.zeros(len(layers), layers[0].num_experts if layers else 0, dtype=torch.bool)
    for chosen, token_ids in _padded_batches(sequences, max_batch_tokens, model.device):
        lengths = torch.tensor([len(sequences[i]) for i in chosen], device=model.device)
        real = (torch.arange(token_ids.shape[1], device=model.device) < lengths[:, None]).flatten()  # [B * T]
        with model.recorded_experts() as recorded:
            model.hidden(token_ids)
        for layer, experts in enumerate(recorded):
            hit[layer, experts[real].flatten().cpu()] = True
    return hit
