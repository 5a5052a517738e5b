"""A packed row: what it holds, which places predict which tokens, and that only lengths decide that."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megagspo.model.context import ContextShare
from megagspo.policy.batch import MicroBatch, RowShape, pack
from megagspo.types import TrainSequence

CPU = torch.device("cpu")


def sequence(prompt: list[int], response: list[int]) -> TrainSequence:
    return TrainSequence(id="s", token_ids=(*prompt, *response), prompt_length=len(prompt))


def packed(sequences: list[TrainSequence], *, multiple: int = 1) -> MicroBatch:
    return pack(sequences, list(range(len(sequences))), shape=RowShape(multiple=multiple), device=CPU)


def test_end_of_sequence_carries_loss_although_padding_is_the_same_token() -> None:
    """A19: completion 5, 6, 2 with pad = eos = 2; the row is filled up, here with two more places."""
    micro = packed([sequence([9, 2, 8], [5, 6, 2])], multiple=4)
    assert micro.input_ids.shape == (1, 8)
    assert micro.targets.tolist() == [5, 6, 2]
    assert micro.predictors.tolist() == [2, 3, 4]


def test_repeated_end_of_sequence_counts_as_long_as_it_is_in_the_response() -> None:
    assert packed([sequence([2], [2, 2, 2])], multiple=8).targets.tolist() == [2, 2, 2]


def test_each_response_token_is_predicted_by_the_place_before_it() -> None:
    micro = packed([sequence([1, 2], [3, 4]), sequence([5], [6]), sequence([7, 8, 9], [10, 11, 12])])
    assert micro.input_ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert micro.position_ids[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]
    assert micro.targets.tolist() == [3, 4, 6, 10, 11, 12]
    assert micro.input_ids[0][micro.predictors].tolist() == [2, 3, 5, 9, 10, 11]
    assert micro.segments.lengths.tolist() == [2, 1, 3]
    assert micro.segments.ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert micro.packing.cu_seqlens_q.tolist() == [0, 4, 6, 12]


def test_members_choose_sequences_and_their_order() -> None:
    batch = [sequence([1], [2]), sequence([3], [4]), sequence([5], [6])]
    micro = pack(batch, [2, 0], device=CPU)
    assert micro.input_ids[0].tolist() == [5, 6, 1, 2]
    assert micro.targets.tolist() == [6, 2]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_row_is_filled_up_to_a_multiple_with_a_segment_of_its_own(multiple: int) -> None:
    micro = packed([sequence([1, 2], [3, 4, 5])], multiple=multiple)
    total = micro.input_ids.shape[1]
    assert total % multiple == 0
    assert total - 5 < multiple
    assert micro.packing.cu_seqlens_q.tolist() == ([0, 5, total] if total > 5 else [0, 5])


def shares(sequences: list[TrainSequence], size: int, *, multiple: int = 1) -> list[MicroBatch]:
    """What each of `size` context-parallel ranks holds of one row."""
    return [
        pack(
            sequences,
            list(range(len(sequences))),
            shape=RowShape(share=ContextShare(rank=rank, size=size), multiple=multiple),
            device=CPU,
        )
        for rank in range(size)
    ]


def test_sequences_are_cut_zigzag_over_context_ranks() -> None:
    """As TransformerEngine cuts them: 2 x 2 chunks, the first and the last for rank 0."""
    first, second = shares([sequence([1, 2], [3, 4, 5]), sequence([6], [7, 8, 9])], 2)
    assert first.input_ids[0].tolist() == [1, 2, 0, 0, 6, 9]
    assert second.input_ids[0].tolist() == [3, 4, 5, 0, 7, 8]
    assert first.position_ids[0].tolist() == [0, 1, 6, 7, 0, 3]
    assert second.position_ids[0].tolist() == [2, 3, 4, 5, 1, 2]
    assert first.packing.cu_seqlens_q.tolist() == second.packing.cu_seqlens_q.tolist() == [0, 8, 12]
    assert first.targets.tolist() == [3, 7]
    assert second.targets.tolist() == [4, 5, 8, 9]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_context_ranks_hold_every_loss_token_once(size: int, multiple: int) -> None:
    draw = random.Random(size)
    tokens = iter(range(1, 1000))
    batch = [
        sequence(
            [next(tokens) for _ in range(draw.randint(1, 5))],
            [next(tokens) for _ in range(draw.randint(1, 30))],
        )
        for _ in range(6)
    ]
    whole = packed(batch)
    parts = shares(batch, size, multiple=multiple)
    assert len({part.input_ids.shape[1] for part in parts}) == 1
    assert parts[0].input_ids.shape[1] % multiple == 0
    found = torch.cat([part.tokens for part in parts])
    assert torch.equal(found.sort().values, torch.arange(len(whole.targets)))
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets[found])
    for part in parts:
        # Tokens are unique and end to end: a loss token's predictor is the one just below it.
        assert torch.equal(part.input_ids[0][part.predictors], part.targets - 1)
        assert torch.equal(part.segments.ids, whole.segments.ids[part.tokens])
        assert torch.equal(part.segments.lengths, whole.segments.lengths)


def test_response_sums_are_made_whole_by_who_holds_the_rest() -> None:
    batch = [sequence([1, 2], [3, 4, 5]), sequence([6], [7, 8, 9])]
    first, second = shares(batch, 2)
    of_first, of_second = torch.tensor([1.0, 10.0]), torch.tensor([2.0, 3.0, 20.0, 30.0])
    rest = second.segments.sum(of_second)
    assert (first.segments.sum(of_first) + rest).tolist() == [6.0, 60.0]
    whole = replace(first.segments, total=lambda held: held + rest)
    assert whole.mean(of_first).tolist() == [2.0, 20.0]


@pytest.mark.parametrize(("size", "multiple"), [(2, 1), (2, 2), (2, 4), (4, 2)])
def test_row_without_sequences_can_be_cut_too(size: int, multiple: int) -> None:
    for part in shares([], size, multiple=multiple):
        assert part.input_ids.shape[1] % multiple == 0
        assert part.input_ids.shape[1] > 0
        assert part.targets.numel() == 0


@pytest.mark.parametrize("multiple", [1, 2])
def test_micro_batch_without_sequences_has_a_row_and_no_targets(multiple: int) -> None:
    """A10: what a rank without samples runs."""
    micro = packed([], multiple=multiple)
    assert micro.input_ids.shape == (1, multiple)
    assert micro.targets.numel() == micro.predictors.numel() == micro.segments.ids.numel() == 0
