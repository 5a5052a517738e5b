"""The other commands as a user types them. What they answer to mistakes is in test_errors.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
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


@pytest.fixture(scope="module")
def short_run(megagspo: Command, warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with an export, whose configuration asks for two samples of each prompt."""
    runs = tmp_path_factory.mktemp("evaluated")
    words = (f"model.path={warm_model}", f"run.dir={runs}", "run.name=short", "trainer.steps=1")
    sizes = ("rollout.prompts=2", "rollout.responses=2", "data.eval.0.size=12", "eval.samples=2")
    megagspo("train", "configs/tiny_moe_cpu.yaml", *words, *sizes, "parallel.expert=1")
    return runs / "short"


def test_eval_scores_a_configuration(megagspo: Command, warm_model: Path, tmp_path: Path) -> None:
    """Two sources, each with scores of its own; every number agrees with every other."""
    scores = tmp_path / "scores.json"
    sources = "[{reasoning_gym: chain_sum, size: 5}, {reasoning_gym: basic_arithmetic, size: 15}]"
    words = (f"model.path={warm_model}", f"data.eval={sources}", "eval.samples=4", "rollout.temperature=0.9")
    shown = megagspo("eval", "configs/tiny_moe_cpu.yaml", *words, "--json", scores, "--show", 3).stdout
    found = json.loads(scores.read_text())
    names = {"avg@4", "avg@4_standard_error", "pass@1", "pass@2", "pass@4", "maj@4"}
    about = {"model": str(warm_model), "prompts": 20, "samples_per_prompt": 4, "temperature": 0.9}
    assert set(found) == names | set(about) | {"sources"}
    assert about.items() <= found.items()
    assert found["avg@4"] == pytest.approx(found["pass@1"])  # exact match gives 0 or 1
    assert found["pass@1"] <= found["pass@2"] <= found["pass@4"]
    assert {name: source["prompts"] for name, source in found["sources"].items()} == {
        "chain_sum": 5,
        "basic_arithmetic": 15,
    }
    for name in ("avg@4", "pass@2", "maj@4"):
        parts = [(source["prompts"], source[name]) for source in found["sources"].values()]
        assert found[name] == pytest.approx(sum(count * value for count, value in parts) / 20)
    for words_shown in ("chain_sum", "basic_arithmetic", "maj@4", f"{found['avg@4']:.3f} ±"):
        assert words_shown in shown
    assert shown.count("->") == 3


def test_eval_scores_a_run_and_its_export_alike(megagspo: Command, short_run: Path, tmp_path: Path) -> None:
    """RUN_DIR, HF_DIR inside it, and the same weights elsewhere with --config: one model, the same scores."""
    shutil.copytree(short_run / "hf", tmp_path / "elsewhere")
    targets = [
        (short_run,),
        (short_run / "hf",),
        (tmp_path / "elsewhere", "--config", short_run / "config.yaml"),
    ]
    found = []
    for number, target in enumerate(targets):
        megagspo("eval", *target, "rollout.temperature=0.7", "--json", tmp_path / f"{number}.json")
        found.append(json.loads((tmp_path / f"{number}.json").read_text()))
    models = [scores.pop("model") for scores in found]
    assert models == [str(short_run / "hf"), str(short_run / "hf"), str(tmp_path / "elsewhere")]
    assert found[0] == found[1] == found[2]
    assert (found[0]["prompts"], found[0]["samples_per_prompt"]) == (12, 2)
    assert "sources" not in found[0]


def test_eval_shows_its_progress_on_a_terminal_and_nowhere_else(short_run: Path) -> None:
    """Standard error is a pseudo-terminal of 24 prompts x 2 responses."""
    import pty

    command = [sys.executable, "-m", "megagspo", "eval", str(short_run), "data.eval.0.size=24"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal is an error
        while piece := os.read(ours, 65536):
            shown += piece
    output, _ = process.communicate()
    assert process.returncode == 0, shown
    assert b"48/48" in shown
    assert b"evaluating" in shown
    assert b"evaluating" not in output


def test_the_warm_up_evaluates_when_it_is_asked_to(
    megagspo: Command, warm_model: Path, tmp_path: Path
) -> None:
    """Every second step; and what it measures last is what `eval` measures of the export."""
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"prompt": "Calculate {i} + 1.", "answer": "{i + 1}"}}\n' for i in range(20))
    )
    base = (
        "configs/tiny_moe_sft_cpu.yaml",
        f"model.path={warm_model}",
        f"run.dir={tmp_path}",
        "run.name=run",
    )
    data = (f"data.train=[{{jsonl: {tmp_path / 'data.jsonl'}}}]", "data.eval.0.size=60")
    steps = ("trainer.steps=4", "eval.every=2", "eval.samples=2", "sft.sequences=8", "parallel.expert=1")
    megagspo("sft", *base, *data, *steps, "optimizer.lr=1e-5", "optimizer.lr_min=1e-6")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval/avg@2" in record] == [2, 4]
    megagspo("eval", tmp_path / "run", "--json", tmp_path / "scores.json")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["avg@2"] > 0
    assert records[-1]["eval/avg@2"] == pytest.approx(scores["avg@2"], abs=1e-12)


def test_doctor_says_what_is_there_and_what_is_not(megagspo: Command) -> None:
    shown = megagspo("doctor").stdout
    assert "megatron-core" in shown
    assert "TransformerEngine" in shown
    assert "megagspo[te]" in "".join(shown.split())


COMMANDS = [
    "train",
    "sft",
    "eval",
    "report",
    "conformance",
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


def test_the_objectives_meet_their_vectors(megagspo: Command, tmp_path: Path) -> None:
    result = megagspo("conformance", "--json", tmp_path / "results.json")
    count = len(json.loads((tmp_path / "results.json").read_text()))
    assert f"{count} of {count} vectors pass" in result.stdout
