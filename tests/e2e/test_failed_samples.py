"""A NaN in one sample stops the step, names the sample and keeps it; the newest checkpoint stands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.rollout.store import read_samples, step_file

Command = Callable[..., subprocess.CompletedProcess[str]]


def planted(rollouts: Path, where: str) -> str:
    """Puts a NaN into one saved sample of step 2; returns its id."""
    file = step_file(rollouts, 2)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    if where == "reward":
        records[3]["reward"] = records[3]["rewards"]["exact"] = "NaN"
    else:
        records[3]["completion"]["logprobs"][0] = "NaN"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records[3]["id"]


@pytest.mark.parametrize("where", ["reward", "logprob"])
def test_a_planted_nan_stops_the_step_and_is_kept(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path, where: str
) -> None:
    base = ("configs/tiny_moe_cpu.yaml", f"model.path={tiny_moe_dir}", f"run.dir={tmp_path}")
    sizes = ("rollout.prompts=4", "rollout.responses=4", "data.eval.0.size=20", "parallel.expert=1")
    saving = ("checkpoint.every=1", "checkpoint.save_hf=false")
    megagspo("train", *base, *sizes, *saving, "run.name=source", "trainer.steps=2")
    name = planted(tmp_path / "source" / "rollouts", where)

    replay = f"rollout.replay={tmp_path / 'source' / 'rollouts'}"
    words = ("train", *base, *sizes, *saving, replay, "run.name=run", "trainer.steps=2")
    result = megagspo(*words, check=False)
    assert result.returncode == 1
    assert f"sample {name}:" in result.stderr
    assert "Traceback" not in result.stderr
    (kept,) = read_samples(step_file(tmp_path / "run" / "failed", 2))
    assert kept.id == name
    assert f"{step_file(tmp_path / 'run' / 'failed', 2)}" in result.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_000001"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
