"""What the engine refuses before it starts, by the name of the request or the number of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from megagspo.errors import EngineError
from megagspo.types import Request, SamplingParams


def check_request(request: Request, *, vocab_size: int, max_length: int) -> None:
    """Raises EngineError naming the request if it cannot be generated."""
    problem = (
        _problem_of_tokens(request.token_ids, vocab_size)
        or _problem_of_sampling(request.sampling)
        or _problem_of_length(len(request.token_ids), request.sampling.max_new_tokens, max_length)
    )
    if problem:
        raise EngineError(f"request {request.id}: {problem}")


def check_sequences(sequences: Sequence[Sequence[int]], *, vocab_size: int, max_length: int) -> None:
    """Raises EngineError giving the index of the first sequence that cannot be scored."""
    for i, sequence in enumerate(sequences):
        problem = _problem_of_tokens(sequence, vocab_size) or _problem_of_length(len(sequence), 0, max_length)
        if problem:
            raise EngineError(f"sequence {i}: {problem}")


def _problem_of_tokens(token_ids: Sequence[int], vocab_size: int) -> str | None:
    if not token_ids:
        return "it has no tokens"
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        outside = next(token for token in token_ids if not 0 <= token < vocab_size)
        return f"token id {outside} is outside the vocabulary of {vocab_size}"
    return None


def _problem_of_length(prompt: int, response: int, max_length: int) -> str | None:
    if prompt + response > max_length:
        return f"{prompt} given and {response} new tokens pass the model's {max_length} positions"
    return None


def _problem_of_sampling(sampling: SamplingParams) -> str | None:
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}, it has to be at least 1"
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature is {sampling.temperature}, it has to be 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, it has to be above 0 and at most 1"
    if sampling.top_k < 1 and sampling.top_k != -1:
        return f"top_k is {sampling.top_k}, it has to be at least 1, or -1 for no limit"
    return None
