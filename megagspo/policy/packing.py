"""Which sequence goes to which data-parallel rank and micro-batch. Pure functions of the lengths, the same on
every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megagspo.errors import DataError
from megagspo.types import TrainSequence

Plan = list[list[list[int]]]
"""plan[data-parallel rank][micro-batch] = positions of sequences; every rank has the same number of
micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What a plan has to respect.

    data_parallel: ranks; token_budget: places of a row; multiple: what a sequence's places are rounded up to
    (context parallelism); count_multiple: what the number of micro-batches is rounded up to; quadratic: c of
    the estimated work of a sequence of n places, n + c n^2 (`model.architecture.quadratic_work`).
    """

    data_parallel: int
    token_budget: int
    multiple: int = 1
    count_multiple: int = 1
    quadratic: float = 0.0

    def places(self, length: int) -> int:
        """What a sequence takes of a row."""
        return length + -length % self.multiple

    def work(self, length: int) -> float:
        """In units of one token's matrix products."""
        return length + self.quadratic * length**2


def plan_microbatches(sequences: Sequence[TrainSequence], packing: Packing) -> Plan:
    """Spreads sequences over ranks by estimated work, then packs each rank's into the fewest micro-batches
    within the budget that can be filled evenly, dearest first.

    Ranks of one expert or pipeline group wait for each other in every micro-batch. So the number is the same
    for all, where need be with empty ones; and the rows that ranks run at the same time are alike, because
    each rank's rows are, and the n-th dearest of all ranks meet. Raises DataError naming a sequence that is
    longer than the budget on its own.
    """
    lengths = [packing.places(len(sequence.token_ids)) for sequence in sequences]
    _check_lengths(sequences, lengths, packing)
    work = [packing.work(length) for length in lengths]
    shares = _spread(work, packing.data_parallel)
    count = max(1, *(_fewest_rows(share, lengths, packing.token_budget) for share in shares))
    while True:
        count += -count % packing.count_multiple
        rows = [_fill(share, lengths, work, packing.token_budget, count) for share in shares]
        plan = [filled for filled in rows if filled is not None]
        if len(plan) == len(rows):
            return plan
        count += 1


def _check_lengths(sequences: Sequence[TrainSequence], lengths: Sequence[int], packing: Packing) -> None:
    for sequence, length in zip(sequences, lengths, strict=True):
        if length > packing.token_budget:
            tokens = len(sequence.token_ids)
            filled = f" and takes {length} places under context parallelism" if length > tokens else ""
            raise DataError(
                f"sequence {sequence.id} has {tokens} tokens{filled}, more than "
                f"trainer.tokens_per_microbatch={packing.token_budget}: raise it to at least {length}, "
                "or lower data.prompt_length_max or rollout.response_length_max"
            )


def _spread(work: Sequence[float], parts: int) -> list[list[int]]:
    """Dearest first to the part with the least work; ties by position, so that the result is one."""
    loads = [(0.0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position in _largest_first(range(len(work)), work):
        load, part = heapq.heappop(loads)
        shares[part].append(position)
        heapq.heappush(loads, (load + work[position], part))
    return shares


def _fewest_rows(positions: Sequence[int], lengths: Sequence[int], budget: int) -> int:
    """First fit, longest first: at most 11/9 of the optimal number of rows."""
    room: list[int] = []
    for position in _largest_first(positions, lengths):
        length = lengths[position]
        slot = next((i for i, free in enumerate(room) if free >= length), None)
        if slot is None:
            room.append(budget - length)
        else:
            room[slot] -= length
    return len(room)


def _fill(
    positions: Sequence[int], lengths: Sequence[int], work: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Rows of even work, the dearest row first; None where so many do not suffice."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room, loads = [budget] * count, [0.0] * count
    for position in _largest_first(positions, work):
        open_ = [row for row in range(count) if room[row] >= lengths[position]]
        if not open_:
            return None
        row = min(open_, key=lambda row: (loads[row], row))
        rows[row].append(position)
        room[row] -= lengths[position]
        loads[row] += work[position]
    return [rows[row] for row in _largest_first(range(count), loads)]


def _largest_first(positions: Sequence[int], sizes: Sequence[float]) -> list[int]:
    return sorted(positions, key=lambda position: (-sizes[position], position))


def fill(plan: Plan, sequences: Sequence[TrainSequence], packing: Packing) -> dict[str, float]:
    """How well the plan uses the ranks: estimated work of the sequences, and what the ranks take for it when
    in every turn all wait for the one with the dearest row; and what is counted beside it. Micro-batches
    without sequences count as nothing."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    taken = [packing.work(packing.places(length)) for length in lengths]
    rows = [[sum(taken[i] for i in members) for members in share] for share in plan]
    return {
        "packed_work": sum(packing.work(length) for length in lengths),
        "packed_work_waited": len(plan) * sum(max(turn) for turn in zip(*rows, strict=True)),
        "packed_tokens": float(sum(lengths)),
        "sequences": float(len(sequences)),
    }
