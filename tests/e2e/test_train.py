"""`megagspo train` in every layout, killed and started again, exported and read by others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megagspo.rollout.store import read_samples, step_file
from tests.e2e.conftest import ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]

# Small enough for seconds, large enough that each rank has several micro-batches of unequal rows and that
# every step has groups that are not constant: a run without gradients would compare nothing. So few samples
# want a lower learning rate than the recipe's.
SMALL = (
    "rollout.prompts=8",
    "rollout.responses=16",
    "trainer.tokens_per_microbatch=128",
    "optimizer.lr=1e-4",
    "checkpoint.every=2",
    "data.eval.0.size=20",
)
# What wall clocks and memory say differs from run to run; everything else may not.
MEASURED = ("time/", "perf/tokens_per_second", "perf/samples_per_second", "memory/")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def computed(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in records(run)
    ]


def words(model: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        "train",
        "configs/tiny_moe_cpu.yaml",
        f"model.path={model}",
        f"run.dir={runs}",
        f"run.name={name}",
        *SMALL,
        *more,
    ]


@pytest.fixture(scope="module")
def whole(megagspo: Command, warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps on two ranks with expert parallel 2 that nothing interrupted."""
    runs = tmp_path_factory.mktemp("whole")
    megagspo(*words(warm_model, runs, "whole", "trainer.steps=5"))
    return runs / "whole"


LAYOUTS = {
    "1 rank": ("parallel.expert=1",),
    "TP=2": ("parallel.tensor=2", "parallel.expert=1"),
    "PP=2": ("parallel.pipeline=2", "parallel.expert=1"),
    "EP=2": ("parallel.expert=2",),
    "DP=2": ("parallel.data=2", "parallel.expert=1"),
    "TP=2 EP=2 PP=2": ("parallel.tensor=2", "parallel.expert=2", "parallel.pipeline=2"),
    "CP=2 EP=2 PP=2 VPP=2": (
        "parallel.context=2",
        "parallel.expert=2",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
    ),
}


@pytest.fixture(scope="module")
def replayed(
    megagspo: Command, warm_model: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same saved rollouts trained on in every layout, two steps each."""
    runs = tmp_path_factory.mktemp("layouts")
    replay = f"rollout.replay={whole / 'rollouts'}"
    for name, cuts in LAYOUTS.items():
        megagspo(*words(warm_model, runs, name.replace(" ", "_"), *cuts, replay, "trainer.steps=2"))
    return runs


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_the_first_step_is_the_same_in_every_layout(replayed: Path, layout: str) -> None:
    """Loss to 1e-6 absolute, gradient norm to 1e-4 relative, over all four updates of the step."""
    one, other = (records(replayed / name.replace(" ", "_"))[0] for name in ("1 rank", layout))
    assert one["policy/grad_norm"] > 0.1
    assert other["policy/loss"] == pytest.approx(one["policy/loss"], abs=1e-6)
    assert other["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-4)
    assert other["optim/lr"] == one["optim/lr"]
    assert other["reward/mean"] == one["reward/mean"]


def test_metrics_have_the_names_of_the_parts_that_exist(whole: Path) -> None:
    expected = {
        "step",
        *(f"reward/{name}" for name in ("mean", "std", "solve_none", "solve_all")),
        *(f"response/{name}" for name in ("length_mean", "truncated_fraction")),
        *(f"policy/{name}" for name in ("loss", "grad_norm", "entropy", "version")),
        *(f"policy/ratio_{name}" for name in ("mean", "max", "p01", "p50", "p99")),
        *("policy/log_ratio_abs_mean", "policy/effective_sample_size"),
        *(f"policy/clip_fraction{side}{of}" for side in ("", "_low", "_high") for of in ("", "_sequences")),
        *(f"advantage/{name}" for name in ("mean", "std", "abs_max", "zero_fraction")),
        "optim/lr",
        *(f"mismatch/{name}" for name in ("logprob_abs_mean", "k3")),
        *(f"mismatch/ratio_in_eps{third}" for third in ("", "_short", "_middle", "_long")),
        "staleness/ratio_in_eps",
        *(f"time/{name}" for name in ("rollout", "old_logprob", "train", "push", "step")),
        *(f"perf/{name}" for name in ("tokens_per_second", "samples_per_second", "packing_efficiency")),
        "memory/peak_gib",
    }
    for record in records(whole):
        assert set(record) == expected


def test_the_version_rises_by_one_a_step_and_the_engine_agrees_with_the_trainer(whole: Path) -> None:
    assert [record["policy/version"] for record in records(whole)] == [1, 2, 3, 4, 5]
    assert all(record["policy/grad_norm"] > 0.1 for record in records(whole)), (
        "a comparison without gradients"
    )
    assert all(record["mismatch/logprob_abs_mean"] < 1e-4 for record in records(whole))
    for step in (1, 5):
        samples = read_samples(step_file(whole / "rollouts", step))
        assert {(s.completion.version_min, s.completion.version_max) for s in samples} == {
            (step - 1, step - 1)
        }


def test_the_export_has_the_trainers_logprobs_in_plain_transformers(whole: Path, megagspo: Command) -> None:
    """The next step's rollouts were scored by the trainer through `mismatch`; here the export scores the last
    saved ones and a run continued from it must measure the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole / "hf")
    megagspo(*words(whole / "hf", whole.parent, "after", "trainer.steps=1", "algorithm.old_logprobs=trainer"))
    assert records(whole.parent / "after")[0]["mismatch/logprob_abs_mean"] < 1e-5
    for sample in read_samples(step_file(whole.parent / "after" / "rollouts", 1))[:8]:
        prompt, response = sample.prompt.token_ids, sample.completion.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, torch.tensor(sample.completion.logprobs), atol=1e-5, rtol=0)


def test_a_run_repeated_is_a_run_repeated(
    megagspo: Command, warm_model: Path, whole: Path, tmp_path: Path
) -> None:
    megagspo(*words(warm_model, tmp_path, "again", "trainer.steps=5"))
    assert computed(tmp_path / "again") == computed(whole)


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "megagspo", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_a_run_killed_at_any_moment_ends_bit_equal(
    megagspo: Command, warm_model: Path, whole: Path, tmp_path: Path, moment: str
) -> None:
    """kill -9 of the command while it trains (after step 3) or writes the checkpoint of step 4; then the same
    command."""
    arguments = words(warm_model, tmp_path, "killed", "trainer.steps=5")
    run = tmp_path / "killed"
    process = start(arguments)
    if moment == "training":
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(records_so_far(run)) >= 3, process)
    else:
        wait_until((run / "checkpoints" / "step_000004.partial").is_dir, process)
    process.send_signal(signal.SIGKILL)
    process.wait()

    result = megagspo(*arguments)
    assert "continues after step" in result.stdout
    assert computed(run) == computed(whole)
    assert (run / "checkpoints" / "latest").read_text().strip() == "step_000005"
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == ["step_000004", "step_000005"]


def records_so_far(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def test_a_bfloat16_run_resumes_bit_equal(megagspo: Command, tmp_path: Path, tmp_path_factory: Any) -> None:
    """Two layers, data parallel 2, distributed optimizer: float32 masters and moments have to come back
    whole."""
    from tools.make_tiny_moe import make_tiny_moe

    model = tmp_path_factory.mktemp("bf16") / "model"
    make_tiny_moe(model, layers=2)

    # Supervised, since a model that was never trained earns no reward and would get no gradient.
    def sft(name: str) -> list[str]:
        base = words(model, tmp_path, name, "data.train=[{reasoning_gym: basic_arithmetic}]")
        cuts = ("parallel.expert=1", "parallel.data=2")
        settings = ("model.dtype=bfloat16", "checkpoint.every=1", "trainer.steps=4", "optimizer.lr=1e-3")
        return ["sft", *base[1:], *cuts, *settings]

    megagspo(*sft("whole"))
    arguments = sft("killed")
    process = start(arguments)
    wait_until((tmp_path / "killed" / "checkpoints" / "step_000002").is_dir, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    megagspo(*arguments)
    assert computed(tmp_path / "killed") == computed(tmp_path / "whole")
    losses = [record["policy/loss"] for record in records(tmp_path / "whole")]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.1


def test_one_rank_killed_ends_the_run_and_is_named(
    megagspo: Command, warm_model: Path, tmp_path: Path
) -> None:
    arguments = words(warm_model, tmp_path, "run", "trainer.steps=200", "checkpoint.every=0")
    process = subprocess.Popen(
        [sys.executable, "-m", "megagspo", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    run = tmp_path / "run"
    wait_until(lambda: (run / "metrics.jsonl").is_file() and len(records_so_far(run)) >= 1, process)  # type: ignore[arg-type]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    second = next(
        pid for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    os.kill(int(second), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in errors
