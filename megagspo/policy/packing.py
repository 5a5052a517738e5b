"""Which sequence goes to which data-parallel rank and micro-batch. Pure functions of the lengths, the same on
every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megagspo.errors import DataError
from megagspo.types import TrainSequence

Plan = list[list[list[int]]]
"""plan[data-parallel rank][micro-batch] = positions of sequences; every rank has the same number of
micro-batches."""


def plan_microbatches(
    sequences: Sequence[TrainSequence],
    *,
    data_parallel: int,
    token_budget: int,
    multiple: int = 1,
    count_multiple: int = 1,
) -> Plan:
    """Spreads sequences over ranks by tokens, then packs each rank's into as few micro-batches of at most
    token_budget tokens. A sequence takes the next multiple of `multiple` places (context parallelism).

    Ranks of one expert or pipeline group wait for each other in every micro-batch, so the number is the same
    for all, and a multiple of count_multiple: ranks with less to do get empty ones. Raises DataError naming a
    sequence that is longer than the budget on its own.
    """
    lengths = _places(sequences, multiple)
    for sequence, length in zip(sequences, lengths, strict=True):
        if length > token_budget:
            tokens = len(sequence.token_ids)
            filled = f" and takes {length} places under context parallelism" if length > tokens else ""
            raise DataError(
                f"sequence {sequence.id} has {tokens} tokens{filled}, more than "
                f"trainer.tokens_per_microbatch={token_budget}: raise it to at least {length}, "
                "or lower data.prompt_length_max or rollout.response_length_max"
            )
    shares = [_pack(share, lengths, token_budget) for share in _spread(lengths, data_parallel)]
    count = max(1, max(len(share) for share in shares))
    count += -count % count_multiple
    return [share + [[] for _ in range(count - len(share))] for share in shares]


def _spread(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Longest first to the part with the fewest tokens; ties by position, so that the result is one."""
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position in _longest_first(range(len(lengths)), lengths):
        load, part = heapq.heappop(loads)
        shares[part].append(position)
        heapq.heappush(loads, (load + lengths[position], part))
    return shares


def _pack(positions: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """First fit, longest first: at most 11/9 of the optimal number of bins."""
    bins: list[list[int]] = []
    room: list[int] = []
    for position in _longest_first(positions, lengths):
        length = lengths[position]
        slot = next((i for i, free in enumerate(room) if free >= length), None)
        if slot is None:
            slot = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[slot].append(position)
        room[slot] -= length
    return bins


def _longest_first(positions: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(positions, key=lambda position: (-lengths[position], position))


def _places(sequences: Sequence[TrainSequence], multiple: int) -> list[int]:
    """What each sequence takes of a row."""
    lengths = (len(sequence.token_ids) for sequence in sequences)
    return [length + -length % multiple for length in lengths]


def fill(plan: Plan, sequences: Sequence[TrainSequence], *, multiple: int = 1) -> dict[str, float]:
    """How full the packed rows are: tokens, and the places they take when every rank waits for the longest
    row of each turn."""
    lengths = _places(sequences, multiple)
    rows = [[sum(lengths[i] for i in members) for members in share] for share in plan]
    places = sum(len(plan) * max(turn) for turn in zip(*rows, strict=True))
    return {
        "packed_tokens": float(sum(len(sequence.token_ids) for sequence in sequences)),
        "packed_places": float(places),
        "sequences": float(len(sequences)),
    }
