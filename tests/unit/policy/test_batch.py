"""A packed row: what it holds, which places predict which tokens, and that only lengths decide that."""

from __future__ import annotations

import pytest
import torch

from megagspo.policy.batch import MicroBatch, pack
from megagspo.types import TrainSequence

CPU = torch.device("cpu")


def sequence(prompt: list[int], response: list[int]) -> TrainSequence:
    return TrainSequence(id="s", token_ids=(*prompt, *response), prompt_length=len(prompt))


def packed(sequences: list[TrainSequence], *, multiple: int = 1) -> MicroBatch:
    return pack(sequences, list(range(len(sequences))), multiple=multiple, device=CPU)


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
    micro = pack(batch, [2, 0], multiple=1, device=CPU)
    assert micro.input_ids[0].tolist() == [5, 6, 1, 2]
    assert micro.targets.tolist() == [6, 2]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_row_is_filled_up_to_a_multiple_with_a_segment_of_its_own(multiple: int) -> None:
    micro = packed([sequence([1, 2], [3, 4, 5])], multiple=multiple)
    total = micro.input_ids.shape[1]
    assert total % multiple == 0
    assert total - 5 < multiple
    assert micro.packing.cu_seqlens_q.tolist() == ([0, 5, total] if total > 5 else [0, 5])


@pytest.mark.parametrize("multiple", [1, 2])
def test_micro_batch_without_sequences_has_a_row_and_no_targets(multiple: int) -> None:
    """A10: what a rank without samples runs."""
    micro = packed([], multiple=multiple)
    assert micro.input_ids.shape == (1, multiple)
    assert micro.targets.numel() == micro.predictors.numel() == micro.segments.ids.numel() == 0
