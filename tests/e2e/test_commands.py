"""The other commands as a user types them, and what they answer to mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.convert.safetensors_io import HfCheckpoint
from tests.e2e.conftest import ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def megatron_checkpoint(
    megagspo: Command, tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "megatron"
    megagspo("convert", "hf-to-megatron", tiny_moe_dir, destination)
    return destination


def test_the_round_trip_through_a_megatron_checkpoint_is_bit_equal(
    megagspo: Command, tiny_moe_dir: Path, megatron_checkpoint: Path, tmp_path: Path
) -> None:
    megagspo("convert", "megatron-to-hf", megatron_checkpoint, tmp_path / "hf")
    result = megagspo("convert", "verify", tiny_moe_dir, tmp_path / "hf")
    assert "are the same" in result.stdout


def test_the_scripts_in_tools_do_what_the_commands_do(tiny_moe_dir: Path, tmp_path: Path) -> None:
    import sys

    for script, source, destination in (
        ("tools/convert_hf_to_megatron.py", tiny_moe_dir, tmp_path / "megatron"),
        ("tools/convert_megatron_to_hf.py", tmp_path / "megatron", tmp_path / "hf"),
    ):
        subprocess.run(
            [sys.executable, script, str(source), str(destination)], cwd=ROOT, check=True, capture_output=True
        )
    assert set(HfCheckpoint(tmp_path / "hf")) == set(HfCheckpoint(tiny_moe_dir))


def test_verify_lists_what_differs(megagspo: Command, tiny_moe_dir: Path, tmp_path: Path) -> None:
    from tools.make_tiny_moe import make_tiny_moe

    make_tiny_moe(tmp_path / "other", seed=1)
    result = megagspo("convert", "verify", tiny_moe_dir, tmp_path / "other", check=False)
    assert result.returncode == 1
    assert "lm_head.weight: values differ" in result.stdout


def test_a_run_starts_from_a_converted_checkpoint_in_another_layout(
    megagspo: Command, warm_model: Path, tmp_path: Path
) -> None:
    """model.checkpoint gives the weights of model.path: the first step on the same rollouts is the same."""
    megagspo("convert", "hf-to-megatron", warm_model, tmp_path / "megatron")
    losses = []
    settings = ("rollout.prompts=4", "rollout.responses=4", "trainer.steps=1", f"run.dir={tmp_path}")
    base = ("train", "configs/tiny_moe_cpu.yaml", f"model.path={warm_model}", *settings)
    megagspo(*base, "run.name=hf")
    replay = f"rollout.replay={tmp_path / 'hf' / 'rollouts'}"
    cuts = ("parallel.tensor=2", "parallel.expert=1")
    megagspo(*base, "run.name=mcore", f"model.checkpoint={tmp_path / 'megatron'}", replay, *cuts)
    for name in ("hf", "mcore"):
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text())["policy/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_eval_scores_a_run_and_a_configuration(megagspo: Command, warm_model: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    words = (f"model.path={warm_model}", "data.eval.0.size=30", "eval.samples=4")
    megagspo("eval", "configs/tiny_moe_cpu.yaml", *words, "--json", scores, "--show", 3)
    found = json.loads(scores.read_text())
    assert {"avg@4", "pass@1", "pass@2", "pass@4"} <= set(found)
    assert found["avg@4"] == pytest.approx(found["pass@1"])  # exact match gives 0 or 1
    assert found["pass@1"] <= found["pass@2"] <= found["pass@4"]


def test_doctor_says_what_is_there_and_what_is_not(megagspo: Command) -> None:
    shown = megagspo("doctor").stdout
    assert "megatron-core" in shown
    assert "TransformerEngine" in shown


COMMANDS = [
    "train",
    "sft",
    "eval",
    "doctor",
    "convert hf-to-megatron",
    "convert megatron-to-hf",
    "convert verify",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(megagspo: Command, command: str) -> None:
    shown = " ".join(megagspo(*command.split(), "--help").stdout.split())
    assert f"Example: megagspo {command}" in shown


def test_readme_names_no_command_that_does_not_exist() -> None:
    for words in re.findall(r"^ {4}megagspo (\S+(?: \S+)?)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert any(words.startswith(command) for command in COMMANDS), words


# what is typed -> words that the one message must hold
MISTAKES = {
    "unknown key": (["trainer.step=1"], ["trainer.step", "trainer.steps"]),
    "bad type": (["trainer.steps=many"], ["trainer.steps", "many"]),
    "no model": (["model.path=/nowhere/model"], ["/nowhere/model", "make demo"]),
    "no checkpoint": (["model.checkpoint=/nowhere/checkpoint"], ["/nowhere/checkpoint"]),
    "heads": (["parallel.tensor=3", "parallel.expert=1"], ["parallel.tensor=3", "heads", "[1, 2, 4]"]),
    "experts": (["parallel.expert=3"], ["parallel.expert=3", "8 experts"]),
    "layers": (["parallel.pipeline=3", "parallel.expert=1"], ["parallel.pipeline=3", "4 layers"]),
    "ranks": (["parallel.data=1"], ["parallel.expert=2", "parallel.data"]),
    "no sequence parallel": (
        ["parallel.tensor=2", "parallel.expert=1", "parallel.sequence=false"],
        ["parallel.sequence"],
    ),
    "gspo with the clip range of grpo": (
        ["algorithm.clip_high=0.2"],
        ["clip_high", "4e-4", "allow_wide_clip"],
    ),
    "no replay": (["rollout.replay=/nowhere/rollouts"], ["/nowhere/rollouts"]),
    "reward": (["reward=[{name: magic}]"], ["magic", "exact"]),
    "a single response": (["rollout.responses=1"], ["rollout.responses"]),
    "prompt too long": (
        ["data.prompt_length_max=3", "parallel.expert=1"],
        ["prompt", "data.prompt_length_max"],
    ),
    "response too long": (
        ["rollout.response_length_max=5000", "parallel.expert=1"],
        ["rollout.response_length_max=5000", "max_position_embeddings"],
    ),
    "unknown task": (
        ["data.train=[{reasoning_gym: basic_arithmetics}]", "parallel.expert=1"],
        ["basic_arithmetics", "basic_arithmetic"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_message_and_status_2(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path, mistake: str
) -> None:
    overrides, expected = MISTAKES[mistake]
    base = ("configs/tiny_moe_cpu.yaml", f"model.path={tiny_moe_dir}", f"run.dir={tmp_path}")
    result = megagspo("train", *base, *overrides, check=False)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert result.stderr.count("error:") == 1, result.stderr
    for words in expected:
        assert words in result.stderr


def test_a_mistake_that_only_ranks_can_see_is_said_once(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path
) -> None:
    base = ("configs/tiny_moe_cpu.yaml", f"model.path={tiny_moe_dir}", f"run.dir={tmp_path}")
    result = megagspo("train", *base, "data.prompt_length_max=3", check=False)
    assert result.returncode == 2
    assert result.stderr.count("error:") == 1, result.stderr
    assert "data.prompt_length_max" in result.stderr


@pytest.mark.parametrize(
    "words", [(), ("trian",), ("train",), ("train", "--fast", "x"), ("convert",), ("convert", "verify", "a")]
)
def test_a_usage_error_of_the_command_line_is_no_traceback(megagspo: Command, words: tuple[str, ...]) -> None:
    result = megagspo(*words, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stdout + result.stderr
    assert "Usage:" in result.stdout + result.stderr


def test_weights_that_do_not_fit_the_config_are_refused(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_moe_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 600}))
    result = megagspo("convert", "hf-to-megatron", model, tmp_path / "megatron", check=False)
    assert result.returncode == 2
    assert "vocab_size=600" in result.stderr
    assert not (tmp_path / "megatron").exists()


def test_a_float32_export_says_so_although_its_source_declared_bfloat16(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_moe_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    megagspo("convert", "hf-to-megatron", model, tmp_path / "megatron")
    megagspo("convert", "megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config | {"dtype": "float32"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("experts", [1, 2], ids=["1 rank", "2 ranks"])
def test_a_full_disk_while_saving_exits_1_and_keeps_what_was_saved(
    megagspo: Command, tiny_moe_dir: Path, tmp_path: Path, experts: int
) -> None:
    base = (
        "train",
        "configs/tiny_moe_cpu.yaml",
        f"model.path={tiny_moe_dir}",
        f"parallel.expert={experts}",
        "rollout.prompts=2",
        "rollout.responses=2",
        "checkpoint.every=1",
        "checkpoint.save_hf=false",
        "trainer.steps=4",
    )
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a small disk")
    try:
        result = megagspo(*base, f"run.dir={tmp_path}", check=False)
        assert result.returncode == 1, result.stderr
        assert "could not be written" in result.stderr
        assert "Traceback" not in result.stderr
        assert (tmp_path / "tiny_moe" / "checkpoints" / "latest").read_text().strip() == "step_000001"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_objectives_meet_their_vectors(megagspo: Command, tmp_path: Path) -> None:
    result = megagspo("conformance", "--json", tmp_path / "results.json")
    count = len(json.loads((tmp_path / "results.json").read_text()))
    assert f"{count} of {count} vectors pass" in result.stdout
