"""The reference policy: a second set of weights that takes the model's place, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import RankPool
from tests.dist.learner import make_policy, update, weights_of
from tests.dist.models import make_sequences

LAYOUTS: dict[str, dict[str, int]] = {
    "one_rank": {},
    "cp2_dp2": {"context": 2, "data": 2},
    "pp2_vpp2_ep2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    "tp2_ep2_pp2": {"tensor": 2, "expert": 2, "pipeline": 2},
}
KL = {"kl": {"coefficient": 0.1, "reference_every": 1}}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2}


def _asked(policy: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of the policy and of its reference."""
    sequences = make_sequences(5)
    return (
        policy.logprobs(sequences, temperature=1.0).logprobs,
        policy.ref_logprobs(sequences, temperature=1.0),
    )


def life_of_a_reference(layout: Any, platform: Any, model: Path, directory: Path) -> dict[str, Any]:
    policy = make_policy(layout, platform, model, algorithm=KL, optimizer=OPTIMIZER)
    found: dict[str, Any] = {"at_the_start": _asked(policy)}
    update(policy, seed=0)
    before = weights_of(policy)
    found["after_an_update"] = _asked(policy)
    after = weights_of(policy)
    found["weights_kept"] = all(torch.equal(before[name], after[name]) for name in before)
    policy.reference.renew()
    update(policy, seed=1)
    found["renewed"] = _asked(policy)
    policy.save(directory)
    return found


def reference_of_a_checkpoint(
    layout: Any, platform: Any, model: Path, directory: Path
) -> tuple[list[Tensor], list[Tensor]]:
    policy = make_policy(layout, platform, model, algorithm=KL, optimizer=OPTIMIZER)
    update(policy, seed=5)  # whatever was there is replaced
    policy.load(directory)
    return _asked(policy)


def assert_same(actual: list[Tensor], expected: list[Tensor], *, exactly: bool = False) -> None:
    """Of another layout: log-probabilities of the order of 10, of which 1e-5 is ten float32 roundings, and
    of weights that differ by up to 2e-5 a coordinate after two updates (test_layouts.py)."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.0 if exactly else 5e-4)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run(life_of_a_reference, moe_dir, tmp_path_factory.mktemp("one_rank"))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_stays_until_renewed_and_travels_with_the_checkpoint(
    ranks: RankPool, moe_dir: Path, tmp_path: Path, one_rank: dict[str, Any], layout: str
) -> None:
    for found in ranks.run(life_of_a_reference, moe_dir, tmp_path, **LAYOUTS[layout]):
        assert_same(*found["at_the_start"], exactly=True)
        policy, reference = found["after_an_update"]
        assert_same(reference, found["at_the_start"][1], exactly=True)
        assert max(float((a - b).abs().max()) for a, b in zip(policy, reference, strict=True)) > 1e-2
        assert found["weights_kept"]
        assert_same(found["renewed"][1], policy, exactly=True)
        for stage in ("after_an_update", "renewed"):
            for actual, expected in zip(found[stage], one_rank[stage], strict=True):
                assert_same(actual, expected)
        renewed = found["renewed"]
    other = "one_rank" if layout != "one_rank" else "pp2_vpp2_ep2"
    for loaded in ranks.run(reference_of_a_checkpoint, moe_dir, tmp_path, **LAYOUTS[other]):
        for actual, expected in zip(loaded, renewed, strict=True):
            assert_same(actual, expected)
