"""One batch, every objective, every layout of four ranks, every cut into micro-batches: the loss and the
gradient are those of float64.

The reference (`invariance.py`) is transformers' model in float64 with the formulas written out. A loss is the
sum of a thousand terms of the order of 1, each rounded to float32: 1e-6. A gradient's tolerance is derived in
`test_layouts.assert_same_gradients`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import SIZE, RankPool
from tests.dist.invariance import (
    OBJECTIVES,
    RESPONSES,
    ROWS,
    Case,
    deviations,
    make_cases,
    make_samples,
    trainable,
)

LOSS, GRADIENT = 1e-6, 1e-5


def every_layout() -> Iterator[dict[str, int]]:
    """Of tensor (with sequence), context, data, pipeline, virtual pipeline, expert and expert-tensor parallel
    in powers of two, what fits on four ranks and divides a model of 4 layers, 2 key and value heads and 4
    experts."""
    two = (1, 2, 4)
    for tensor, context, data, pipeline in itertools.product((1, 2), two, two, two):
        if tensor * context * data * pipeline > SIZE:
            continue
        sharing = tensor * context * data
        chunks = (1, 2) if pipeline == 2 else (1,)
        for expert, expert_tensor, virtual in itertools.product(two, two, chunks):
            if sharing % (expert * expert_tensor) == 0:
                yield {
                    "tensor": tensor,
                    "context": context,
                    "data": data,
                    "pipeline": pipeline,
                    "virtual_pipeline": virtual,
                    "expert": expert,
                    "expert_tensor": expert_tensor,
                }


SHORT = {
    "tensor": "tp",
    "context": "cp",
    "data": "dp",
    "pipeline": "pp",
    "virtual_pipeline": "vpp",
    "expert": "ep",
    "expert_tensor": "etp",
}
LAYOUTS = {
    "_".join(f"{SHORT[key]}{size}" for key, size in sizes.items() if size > 1) or "one_rank": sizes
    for sizes in every_layout()
}
PAIRWISE = [
    "tp2_cp2_ep2_etp2",
    "tp2_dp2_ep2_etp2",
    "cp2_dp2_ep2_etp2",
    "tp2_pp2_vpp2_ep2",
    "cp2_pp2_vpp2_ep2",
    "dp2_pp2_vpp2_ep2",
    "tp2_pp2_vpp2_etp2",
    "cp2_pp2_vpp2_etp2",
    "dp2_pp2_vpp2_etp2",
]
"""Every two of the seven kinds of parallelism meet in one of these."""
ALWAYS = ("gspo", "dapo")
OTHERS = [name for name in OBJECTIVES if name not in ALWAYS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.dist.models import make_moe

    return make_moe(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=512)


@pytest.fixture(scope="module")
def made(model: Path) -> tuple[dict[str, Case], float]:
    return make_cases(model)


@pytest.fixture(scope="module")
def cases_file(made: tuple[dict[str, Case], float], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cases") / "cases.pt"
    torch.save(made[0], file)
    return file


def check(ranks: RankPool, model: Path, cases_file: Path, layout: str, runs: Any) -> None:
    wrong = []
    for rank, found in enumerate(
        ranks.run(deviations, model, cases_file, list(runs), timeout=300.0, **LAYOUTS[layout])
    ):
        for run, deviation in found.items():
            if not (deviation.loss <= LOSS and deviation.gradient <= GRADIENT):
                wrong.append((rank, run, deviation))
    assert not wrong


def test_nothing_is_decided_by_rounding(made: tuple[dict[str, Case], float]) -> None:
    """What makes the comparisons below fair, and what makes them worth making."""
    cases, margin = made
    assert margin > 1e-4
    for name, case in cases.items():
        assert case.closest > 1e-5, name
        assert 0.1 < case.clipped < 0.9, name


def test_the_batch_is_what_the_comparison_needs() -> None:
    samples = make_samples()
    assert [s.loss_tokens for s in samples].count(0) == 1
    kept = trainable(samples)
    assert len(kept) == len(samples) - 1 == len(RESPONSES)
    assert any(s.loss_mask is not None for s in kept)
    assert {len(s.token_ids) - s.prompt_length for s in kept} >= {1, 300}


def test_pairs_of_kinds_of_parallelism_are_all_there() -> None:
    assert len(LAYOUTS) == 61
    together = {
        pair
        for name in PAIRWISE
        for pair in itertools.combinations([key for key, size in LAYOUTS[name].items() if size > 1], 2)
    }
    assert together == set(itertools.combinations(SHORT, 2))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_budgets_cut_the_batch_as_they_are_said_to(
    ranks: RankPool, model: Path, cases_file: Path, rows: int
) -> None:
    (found,) = ranks.run(deviations, model, cases_file, [("gspo", rows)])
    assert found["gspo", rows].rows == rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gspo_and_dapo_are_the_same_in_every_layout(
    ranks: RankPool, model: Path, cases_file: Path, layout: str
) -> None:
    check(ranks, model, cases_file, layout, [("gspo", 5), ("dapo", 2)])


@pytest.mark.parametrize("layout", ["one_rank", *PAIRWISE])
def test_other_objectives_are_the_same_where_two_kinds_of_parallelism_meet(
    ranks: RankPool, model: Path, cases_file: Path, layout: str
) -> None:
    check(ranks, model, cases_file, layout, [(name, 2) for name in OTHERS])


@pytest.mark.parametrize("layout", ["one_rank", "dp2", "cp2", "tp2", "pp2", "dp2_ep2", "tp2_pp2_vpp2_ep2"])
def test_every_cut_into_micro_batches_is_the_same(
    ranks: RankPool, model: Path, cases_file: Path, layout: str
) -> None:
    check(ranks, model, cases_file, layout, itertools.product(ALWAYS, (1, 2, 5)))


@pytest.mark.parametrize("layout", ["pp2_vpp2", "cp2_pp2_vpp2", "dp2_pp2_vpp2_ep2"])
def test_interleaved_schedule_takes_any_number_of_micro_batches(
    ranks: RankPool, model: Path, cases_file: Path, layout: str
) -> None:
    """Two, four, and five, which the schedule does not take as they are."""
    check(ranks, model, cases_file, layout, [("gspo", rows) for rows in (2, 4, 5)])


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_objective_is_the_same_in_every_layout(
    ranks: RankPool, model: Path, cases_file: Path, layout: str
) -> None:
    """Each objective in each layout, the cut going round: every objective meets every cut, and every layout
    does. Of the product of all three this is a quarter, which is what continuous integration has time for."""
    first, cuts = list(LAYOUTS).index(layout), list(ROWS)
    check(ranks, model, cases_file, layout, [
        (name, cuts[(first + number) % len(cuts)]) for number, name in enumerate(OBJECTIVES)
    ])
