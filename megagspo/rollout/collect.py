"""From prompts to requests: ids that do not collide and seeds that a repeated run repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megagspo.types import Prompt, Request, SamplingParams


def group_id(prompt: Prompt, *, step: int, position: int) -> str:
    """The id shared by the responses to the prompt at this position of this step.

    The position is part of it, as a step may hold one prompt twice: two groups, not one of double size.
    """
    return f"{step}/{position}/{prompt.id}"


def request_seed(prompt: Prompt, *, run_seed: int, step: int, position: int, index: int) -> int:
    """63 bits from where the request stands in the run: the same on every machine, layout and Python."""
    place = repr((run_seed, step, position, prompt.id, index)).encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big") >> 1


def build_requests(
    prompts: Sequence[Prompt],
    *,
    responses: int,
    sampling: SamplingParams,
    run_seed: int,
    step: int,
    first_position: int = 0,
) -> list[Request]:
    """`responses` requests for each prompt, side by side: number p * responses + i is the i-th of prompt p.

    Ids are `<group id>#<i>`. Give all prompts of a step in one call and divide the requests afterwards; where
    more prompts are drawn later in the same step, first_position is the number of those that came before.
    """
    requests = []
    for position, prompt in enumerate(prompts, start=first_position):
        group = group_id(prompt, step=step, position=position)
        for i in range(responses):
            seed = request_seed(prompt, run_seed=run_seed, step=step, position=position, index=i)
            requests.append(
                Request(id=f"{group}#{i}", token_ids=prompt.token_ids, sampling=sampling, seed=seed)
            )
    return requests
