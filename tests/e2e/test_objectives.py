"""`megagspo train` with every objective, on the tiny model."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config.algorithm import DEFAULTS

Command = Callable[..., subprocess.CompletedProcess[str]]

# Each option is switched on once.
OPTIONS = {
    "gspo": ["algorithm.kl={coefficient: 0.01}", "algorithm.entropy_coefficient=0.001"],
    "gspo_token": ["algorithm.correction={mode: truncate, level: sequence}"],
    "grpo": ["algorithm.kl={coefficient: 0.01, where: reward, reference_every: 2}", "trainer.epochs=2"],
    "dapo": ["algorithm.dynamic_sampling=true", "algorithm.overlong={buffer: 2, penalty: 0.5}"],
    "cispo": ["algorithm.correction={mode: mask}", "algorithm.off_policy_mask={threshold: 0.5}"],
    "rloo": ["algorithm.old_logprobs=rollout"],
    "reinforce_pp": ["algorithm.kl={coefficient: 0.01, where: reward}"],
    "dr_grpo": ["algorithm.dual_clip=3.0"],
    "hybrid": ["algorithm.hybrid_weight=0.25"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", DEFAULTS)
def test_every_objective_trains(megagspo: Command, warm_model: Path, tmp_path: Path, name: str) -> None:
    sizes = ("rollout.prompts=8", "rollout.responses=8", "data.eval.0.size=20", "parallel.expert=1")
    saving = ("checkpoint.every=0", "checkpoint.save_hf=false")
    base = (f"model.path={warm_model}", f"run.dir={tmp_path}", "run.name=run", "optimizer.lr=1e-4")
    words = ("configs/tiny_moe_cpu.yaml", *base, *sizes, *saving, f"algorithm.name={name}", *OPTIONS[name])
    megagspo("train", *words, "trainer.steps=5")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["policy/version"] for record in records] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(record["policy/loss"]) for record in records)
    assert any(record["policy/grad_norm"] > 0.01 for record in records)
    assert ("policy/kl_ref" in records[0]) == any(".kl=" in option for option in OPTIONS[name])
    assert ("time/old_logprob" in records[0]) == (name != "rloo")
