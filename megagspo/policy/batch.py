"""From sequences to the tensors of a packed micro-batch.

Shapes: T tokens of the packed row, R loss tokens in it, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.algo.segments import Segments
from megagspo.model.attention import PackedSegments, pack_segments
from megagspo.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed row.

    members: positions of its sequences in the mini-batch; input_ids, position_ids [1, T]; packing: where
    segments begin and end; predictors [R]: the place in the row whose logits predict each loss token;
    targets [R]: those tokens.
    """

    members: list[int]
    input_ids: Tensor
    position_ids: Tensor
    packing: PackedSegments
    predictors: Tensor
    targets: Tensor
    segments: Segments


def pack(
    sequences: Sequence[TrainSequence], members: list[int], *, multiple: int, device: torch.device
) -> MicroBatch:
    """Lays the members end to end. The row is filled up to a multiple (sequence parallelism cuts it) with one
    segment of tokens that no loss sees; a micro-batch without members is that segment alone."""
    chosen = [sequences[member] for member in members]
    lengths = [len(sequence.token_ids) for sequence in chosen]
    total = sum(lengths)
    filling = -total % multiple if total else max(multiple, 1)
    segments = [*lengths, filling] if filling else lengths
    ids = [token for sequence in chosen for token in sequence.token_ids] + [0] * filling
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    predictors = [
        start + position - 1
        for sequence, start in zip(chosen, starts, strict=True)
        for position in sequence.loss_positions
    ]
    input_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    index = torch.tensor(predictors, dtype=torch.int64, device=device)
    return MicroBatch(
        members=members,
        input_ids=input_ids[None],
        position_ids=torch.cat([torch.arange(length, device=device) for length in segments])[None],
        packing=pack_segments(segments, device=device),
        predictors=index,
        targets=input_ids[index + 1],
        segments=Segments.of([sequence.loss_tokens for sequence in chosen], device=device),
    )
