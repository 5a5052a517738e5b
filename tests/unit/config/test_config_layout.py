"""`parallel` resolved against a number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megagspo.config.layout import Layout, ParallelConfig
from megagspo.errors import ConfigError


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2))))
def test_auto_without_a_launcher_takes_the_fewest_ranks_that_fit(sizes: tuple[int, int, int, int]) -> None:
    tensor, pipeline, expert, expert_tensor = sizes
    parallel = ParallelConfig(
        tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, data="auto"
    )
    layout = parallel.resolve()
    fitting = [data for data in range(1, 9) if tensor * data % (expert * expert_tensor) == 0]
    assert layout.data == fitting[0]
    assert layout.world_size == tensor * pipeline * layout.data
    assert parallel.resolve(layout.world_size) == layout


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2), (1, 2, 3), (1, 2, 4))))
def test_experts_share_the_context_parallel_ranks_too(sizes: tuple[int, int, int, int]) -> None:
    tensor, pipeline, context, expert = sizes
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, context=context, expert=expert, data="auto")
    layout = parallel.resolve()
    fitting = [data for data in range(1, 9) if tensor * context * data % expert == 0]
    assert layout.data == fitting[0]
    assert layout.world_size == tensor * pipeline * context * layout.data
    assert parallel.resolve(3 * layout.world_size).data == 3 * layout.data


def test_auto_fills_the_ranks_that_were_started() -> None:
    layout = ParallelConfig(tensor=2, pipeline=2, expert=4, data="auto").resolve(16)
    assert layout == Layout(
        tensor=2, pipeline=2, expert=4, expert_tensor=1, data=4, sequence=True, world_size=16
    )


@pytest.mark.parametrize(
    ("tensor", "sequence", "expected"),
    [(1, None, False), (1, False, False), (2, None, True), (2, False, False)],
)
def test_sequence_follows_tensor_unless_told(tensor: int, sequence: bool | None, expected: bool) -> None:
    assert ParallelConfig(tensor=tensor, sequence=sequence).resolve().sequence is expected


@pytest.mark.parametrize(
    ("sizes", "world_size", "words"),
    [
        (
            {"expert": 2},
            None,
            ["parallel.expert=2", "divisible by 2, it is 1", "parallel.data=2", "data=auto"],
        ),
        (
            {"expert": 2, "tensor": 3},
            3,
            ["divisible by 2, it is 3", "parallel.data=2", "multiple of 6 ranks"],
        ),
        ({"expert": 2, "expert_tensor": 2, "data": 2}, None, ["expert_tensor=2", "divisible by 4, it is 2"]),
        ({"expert": 2, "data": "auto"}, 3, ["divisible by 2, it is 3", "multiple of 2 ranks"]),
        ({"data": 2}, 3, ["parallel.tensor=1 * pipeline=1 * data=2", "2 ranks", "3 were started"]),
        ({"tensor": 2, "data": "auto"}, 3, ["parallel.data=auto", "3 ranks", "multiple of 2 ranks"]),
        (
            {"context": 3, "expert": 2},
            None,
            ["tensor*context*data divisible by 2, it is 3", "parallel.data=2", "multiple of 6 ranks"],
        ),
        (
            {"virtual_pipeline": 2},
            None,
            ["parallel.virtual_pipeline=2", "parallel.pipeline=1", "remove parallel.virtual_pipeline"],
        ),
        ({"context": 2}, 3, ["pipeline=1 * context=2 * data=1 makes 2", "3 were started"]),
        ({"context": 2, "data": "auto"}, 3, ["context=2 = 2 does not divide", "multiple of 2 ranks"]),
        ({"sequence": True}, None, ["parallel.sequence=true", "parallel.tensor=1", "remove"]),
        (
            {"tensor": 2, "expert": 2, "sequence": False},
            None,
            ["parallel.sequence=false", "parallel.tensor=2", "expert=2", "remove parallel.sequence"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(
    sizes: dict[str, Any], world_size: int | None, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**sizes).resolve(world_size)
    for word in words:
        assert word in str(caught.value)
