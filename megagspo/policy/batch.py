"""From sequences to the tensors of a packed micro-batch.

Shapes: T tokens of the packed row, R loss tokens in it, N sequences; under context parallelism T and R are
those that this rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.algo.segments import Segments
from megagspo.model.attention import PackedSegments, pack_segments
from megagspo.model.context import WHOLE, ContextShare
from megagspo.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """How rows are cut over ranks. share: this rank's part of every sequence; multiple: what its part of a
    row is filled up to a multiple of (sequence parallelism cuts it again)."""

    share: ContextShare = WHOLE
    multiple: int = 1

    def filling(self, length: int) -> int:
        """Places at a sequence's end that no loss and no token of the sequence sees."""
        return -length % self.share.multiple

    def row_filling(self, total: int) -> int:
        """Places after sequences of `total` places in all; a row is never empty."""
        unit = math.lcm(self.share.multiple, self.share.size * self.multiple)
        return -total % unit if total else unit


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """This rank's part of one packed row.

    members: positions of its sequences in the mini-batch; input_ids, position_ids [1, T]; packing: where
    segments begin and end; predictors [R]: the place in the row whose logits predict each loss token;
    targets [R]: those tokens; tokens [R]: which of the members' loss tokens, laid end to end, they are.
    """

    members: list[int]
    input_ids: Tensor
    position_ids: Tensor
    packing: PackedSegments
    predictors: Tensor
    targets: Tensor
    tokens: Tensor
    segments: Segments


def pack(
    sequences: Sequence[TrainSequence],
    members: list[int],
    *,
    device: torch.device,
    shape: RowShape | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> MicroBatch:
    """Lays the members end to end, each filled up as the shape wants it, and the row with one segment of
    tokens that no loss sees; a micro-batch without members is that segment alone. Of the row this rank's part
    is kept: a loss token is held where its predicting position is.

    total: see `Segments`.
    """
    shape = shape or RowShape()
    chosen = [sequences[member] for member in members]
    places = [len(sequence.token_ids) + shape.filling(len(sequence.token_ids)) for sequence in chosen]
    filling = shape.row_filling(sum(places))
    lengths = [*places, filling] if filling else places
    starts = [sum(places[:i]) for i in range(len(places))]
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    for sequence, start in zip(chosen, starts, strict=True):
        ids[start : start + len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
    predicting = torch.tensor(
        [
            start + position - 1
            for sequence, start in zip(chosen, starts, strict=True)
            for position in sequence.loss_positions
        ],
        dtype=torch.int64,
    )
    held = shape.share.places(lengths)
    local = torch.full((len(ids),), -1)
    local[held] = torch.arange(len(held))
    tokens = torch.nonzero(local[predicting] >= 0).flatten()
    segments = Segments.of([sequence.loss_tokens for sequence in chosen], device=device)
    return MicroBatch(
        members=members,
        input_ids=ids[held][None].to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[held][None].to(device),
        packing=pack_segments(lengths, share=shape.share, device=device),
        predictors=local[predicting[tokens]].to(device),
        targets=ids[predicting[tokens] + 1].to(device),
        tokens=tokens.to(device),
        segments=segments.part(tokens.to(device), total),
    )
