"""The order of training: every prompt once an epoch, decided by the seed, continued exactly."""

from __future__ import annotations

import json

import pytest

from megagspo.data import PromptStream
from megagspo.errors import DataError
from megagspo.types import Prompt


def prompts(count: int, *, token: int = 0) -> list[Prompt]:
    return [Prompt(id=f"p/{i}", source="p", text=str(i), token_ids=(token, i)) for i in range(count)]


def ids(stream: PromptStream, count: int) -> list[str]:
    return [prompt.id for prompt in stream.take(count)]


def test_every_epoch_is_another_permutation_also_across_batches() -> None:
    stream = PromptStream(prompts(10), seed=0)
    order = [each for _ in range(10) for each in ids(stream, 3)]
    epochs = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(prompt.id for prompt in prompts(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_depends_on_the_seed_and_not_on_how_it_is_taken() -> None:
    assert ids(PromptStream(prompts(10), seed=0), 25) != ids(PromptStream(prompts(10), seed=1), 25)
    stream = PromptStream(prompts(10), seed=0)
    assert ids(stream, 1) + ids(stream, 23) + ids(stream, 1) == ids(PromptStream(prompts(10), seed=0), 25)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ids(PromptStream(prompts(5), seed=0), 5) == ["p/0", "p/1", "p/4", "p/3", "p/2"]


@pytest.mark.parametrize("taken", [0, 7, 10, 13, 20])
def test_a_restored_stream_continues_where_it_was(taken: int) -> None:
    stream = PromptStream(prompts(10), seed=0)
    stream.take(taken)
    state = json.loads(json.dumps(stream.state_dict()))
    restored = PromptStream(prompts(10), seed=0)
    restored.take(4)
    restored.load_state_dict(state)
    assert ids(restored, 25) == ids(stream, 25)


@pytest.mark.parametrize("other", [prompts(9), prompts(10, token=1), prompts(10)[::-1]])
def test_a_state_of_other_data_is_refused(other: list[Prompt]) -> None:
    state = PromptStream(prompts(10), seed=0).state_dict()
    with pytest.raises(DataError, match="other prompts"):
        PromptStream(other, seed=0).load_state_dict(state)


def test_a_state_of_another_seed_is_refused() -> None:
    state = PromptStream(prompts(10), seed=0).state_dict()
    with pytest.raises(DataError, match=r"Set run\.seed to 0"):
        PromptStream(prompts(10), seed=1).load_state_dict(state)


def test_a_stream_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
