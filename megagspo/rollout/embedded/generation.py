"""The decode loop: requests in, token ids and log-probabilities out. No versions, no locks, no threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.errors import NumericsError
from megagspo.rollout.embedded.model import LanguageModel
from megagspo.rollout.embedded.sampling import RowSampling, sample
from megagspo.types import FinishReason, Request

# Finished rows are dropped once they are this share of the batch: dropping copies the cache of the others.
_DROP_FROM = 1 / 8


@dataclass(frozen=True)
class Generated:
    """One response as the loop leaves it; `len(logprobs) == len(token_ids)` whatever the reason."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


NEVER_STARTED = Generated((), (), "abort")


def waves(requests: Sequence[Request], max_batch_tokens: int) -> Iterator[list[int]]:
    """Cuts the requests into batches of at most max_batch_tokens cached tokens, each a list of indices.

    Requests of one prompt stay together, as the prompt is computed once a batch; prompts of like length too,
    as the shorter are padded. A request that is larger than the bound is a batch of its own.
    """
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].token_ids), requests[i].token_ids))
    wave: list[int] = []
    longest_response = 0
    for i in order:
        response = max(longest_response, requests[i].sampling.max_new_tokens)
        if wave and (len(wave) + 1) * (len(requests[i].token_ids) + response) > max_batch_tokens:
            yield wave
            wave, response = [], requests[i].sampling.max_new_tokens
        wave.append(i)
        longest_response = response
    if wave:
        yield wave


@torch.inference_mode()
def generate_wave(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    may_continue: Callable[[], bool],
    progress: Callable[[int], None] | None = None,
) -> list[Generated]:
    """Generates for all requests as one batch; in the order of the requests.

    may_continue is asked before each token; when it says no, what is unfinished ends with reason `abort`.
    progress is told how many requests finished since it was last called.
    """
    device = model.device
    rows = RowSampling.of(
        [r.sampling for r in requests], [r.seed for r in requests], vocab_size=model.vocab_size, device=device
    )
    batch = _Batch(requests, device)
    logits = batch.prefill(model)  # [B, V]
    written = 0
    while True:
        tokens, logprobs = sample(logits, rows, written)  # [B]
        batch.token_ids[batch.alive, written] = tokens
        batch.logprobs[batch.alive, written] = logprobs
        written += 1
        stopped = rows.is_stop(tokens)
        finished = (stopped | (rows.max_new_tokens <= written)).logical_and_(batch.running)
        if newly := int(finished.sum()):
            batch.finish(finished, stopped, written)
            if progress is not None:
                progress(newly)
        if batch.rows_running == 0 or not may_continue():
            break
        if (keep := batch.worth_dropping()) is not None:
            rows, tokens = rows.select(keep), tokens[keep]
            batch.keep(keep)
        logits = batch.step(model, tokens)
    results = batch.results(written)
    for request, result in zip(requests, results, strict=True):
        if any(map(math.isnan, result.logprobs)):
            raise NumericsError(f"request {request.id}: the model's logits hold NaN")
    return results


class _Batch:
    """The rows of one wave: their cache, what each sees of it, and what they have written.

    Prompts are padded on the right, so a row's cache is its prompt, a gap up to the longest prompt, and its
    response.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests = requests
        self.device = device
        count = len(requests)
        longest = max(r.sampling.max_new_tokens for r in requests)
        self.token_ids = torch.zeros(count, longest, dtype=torch.int64, device=device)  # [requests, response]
        self.logprobs = torch.zeros(count, longest, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)  # 0: not finished
        self.stopped = torch.zeros(count, dtype=torch.bool, device=device)
        self.alive = torch.arange(count, device=device)  # [B] which request each row of the batch is
        self.running = torch.ones(count, dtype=torch.bool, device=device)  # [B]
        self.rows_running = count

    def prefill(self, model: LanguageModel) -> Tensor:
        """Computes each distinct prompt once, then gives every row its copy; the first logits, [B, V]."""
        distinct = {r.token_ids: None for r in self.requests}
        index = {prompt: i for i, prompt in enumerate(distinct)}
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=self.device)
        self.width = max(len(prompt) for prompt in distinct)
        padded = [[*prompt, *[0] * (self.width - len(prompt))] for prompt in distinct]
        self.cache = model.new_cache(self.width + self.token_ids.shape[1])
        hidden = model.hidden(torch.tensor(padded, device=self.device), cache=self.cache)  # [P, T, D]
        first = model.logits(hidden[torch.arange(len(distinct), device=self.device), lengths - 1])  # [P, V]
        row_prompt = torch.tensor([index[r.token_ids] for r in self.requests], device=self.device)  # [B]
        self.cache.batch_select_indices(row_prompt)
        self.positions = lengths[row_prompt, None]  # [B, 1] of the next token
        self.mask: Tensor | None = None
        if bool((lengths != self.width).any()):
            slots = torch.arange(self.width + self.token_ids.shape[1], device=self.device)
            self.mask = (slots < self.positions) | (slots >= self.width)  # [B, prompt + response]
        return first[row_prompt]

    def step(self, model: LanguageModel, tokens: Tensor) -> Tensor:
        """Appends tokens [B] to the rows and returns the logits [B, V] of the next ones."""
        self.width += 1
        mask = None if self.mask is None else self.mask[:, None, None, : self.width]
        hidden = model.hidden(tokens[:, None], cache=self.cache, positions=self.positions, mask=mask)
        self.positions = self.positions + 1
        return model.logits(hidden[:, 0])

    def finish(self, finished: Tensor, stopped: Tensor, written: int) -> None:
        """Notes the end of the rows marked in finished [B]; they are computed on until they are dropped."""
        done = self.alive[finished]
        self.lengths[done] = written
        self.stopped[done] = stopped[finished]
        self.running &= ~finished
        self.rows_running -= len(done)

    def worth_dropping(self) -> Tensor | None:
        """The rows to go on with, or None while too few have finished."""
        if len(self.alive) - self.rows_running < _DROP_FROM * len(self.alive) or self.rows_running == len(
            self.alive
        ):
            return None
        return self.running.nonzero().squeeze(1)

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.alive, self.running, self.positions = self.alive[rows], self.running[rows], self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def results(self, written: int) -> list[Generated]:
        token_ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        results = []
        for i, (length, stopped) in enumerate(zip(self.lengths.tolist(), self.stopped.tolist(), strict=True)):
            reason: FinishReason = "stop" if stopped else "length" if length else "abort"
            length = length or written
            results.append(Generated(tuple(token_ids[i][:length]), tuple(logprobs[i][:length]), reason))
        return results
