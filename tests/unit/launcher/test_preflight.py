"""What a command was given: which model is evaluated on what, and what a run in the directory has made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config import dump_config, load_config
from megagspo.errors import ConfigError, MissingError, UserError
from megagspo.launcher.preflight import evaluation_config, nothing_to_do, run_config

Config = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path, tiny_moe_dir: Path) -> Config:
    """Writes a configuration of one rank to FILE, with `lines` added to it."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')

    def write(file: Path, *lines: str) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = f"{{jsonl: {tmp_path / 'data.jsonl'}}}"
        text = f"data: {{train: [{data}], eval: [{data}]}}\nmodel: {{path: {tiny_moe_dir}}}\n"
        file.write_text("".join([text, *(line + "\n" for line in lines)]))
        return file

    return write


@pytest.fixture
def run(tmp_path: Path, write_config: Config) -> Path:
    """The directory of a run that started from a Megatron checkpoint and made an export."""
    config = load_config(
        write_config(tmp_path / "start.yaml"), ["model.checkpoint=gone/for/long", "eval.samples=3"]
    )
    run = tmp_path / "2025"
    (run / "hf").mkdir(parents=True)
    (run / "hf" / "config.json").write_text("{}")
    (run / "config.yaml").write_text(dump_config(config))
    return run


def test_a_configuration_is_evaluated_as_it_is(
    tmp_path: Path, write_config: Config, tiny_moe_dir: Path
) -> None:
    config = evaluation_config(write_config(tmp_path / "c.yaml"), ["eval.samples=5"])
    assert (config.model.path, config.eval.samples) == (str(tiny_moe_dir), 5)


def test_of_a_run_its_export_is_evaluated_whatever_it_started_from(run: Path) -> None:
    config = evaluation_config(run, ["rollout.temperature=0.5"])
    assert (config.model.path, config.model.checkpoint) == (str(run / "hf"), None)
    assert (config.eval.samples, config.rollout.temperature) == (3, 0.5)


def test_a_hugging_face_directory_is_evaluated_as_the_run_it_is_in(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluation_config(run / "hf", []) == evaluation_config(run, [])
    monkeypatch.chdir(run / "hf")
    assert evaluation_config(Path("."), []).eval == evaluation_config(run, []).eval


@pytest.mark.parametrize("target", ["2025", "2025/hf", "7"])
def test_another_configuration_may_say_on_what(
    run: Path, tmp_path: Path, write_config: Config, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """By relative names too, of which YAML would take `7` for a number."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    file = write_config(tmp_path / "other.yaml", "eval: {samples: 7}")
    config = evaluation_config(Path(target), [], file=file)
    assert config.eval.samples == 7
    assert config.model.path == {"2025": "2025/hf"}.get(target, target)


def test_evaluation_needs_no_training_data(run: Path, tmp_path: Path) -> None:
    evaluation_config(run, ["data.train=[{jsonl: gone.jsonl}]", "rollout.replay=gone"])
    with pytest.raises(MissingError, match=r"data\.eval\.0\.jsonl"):
        evaluation_config(run, ["data.eval=[{jsonl: gone.jsonl}]"])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_run_without_an_export_says_how_to_make_one(run: Path, checkpoint: bool) -> None:
    (run / "hf" / "config.json").unlink()
    (run / "hf").rmdir()
    words = r"checkpoint\.save_hf=true"
    if checkpoint:
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "latest").write_text("step_000004\n")
        words += rf".*megatron-to-hf {run}/checkpoints/step_000004 DIR.*eval DIR --config {run}/config\.yaml"
    with pytest.raises(MissingError, match=words):
        evaluation_config(run, [])


def test_evaluation_under_a_launcher_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ranks would evaluate everything, and write the same file."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    evaluation_config(run, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process, but 2 were started"):
        evaluation_config(run, [])


def save(run: Path, *, step: int, command: str = "train") -> None:
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "command": command}))
    (run / "checkpoints" / "latest").write_text(checkpoint.name + "\n")


@pytest.mark.parametrize(("steps", "idle"), [(4, True), (5, False), (6, False)])
def test_only_fewer_steps_than_were_made_are_nothing_to_do(
    tmp_path: Path, write_config: Config, steps: int, idle: bool
) -> None:
    """With exactly as many the run may still lack its export: it is started."""
    save(tmp_path / "runs" / "a", step=5)
    overrides = [f"run.dir={tmp_path / 'runs'}", "run.name=a", f"trainer.steps={steps}"]
    config = run_config(write_config(tmp_path / "c.yaml"), overrides, command="train")
    line = nothing_to_do(config)
    assert (line is not None) == idle
    if line:
        assert "has made 5 steps already" in line
        assert "trainer.steps=4" in line


def test_ranks_of_a_launcher_do_not_decide_that_there_is_nothing_to_do(
    tmp_path: Path, write_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "runs" / "a", step=5)
    overrides = [f"run.dir={tmp_path / 'runs'}", "run.name=a", "trainer.steps=4", "parallel.data=auto"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert nothing_to_do(run_config(write_config(tmp_path / "c.yaml"), overrides, command="train")) is None


@pytest.mark.parametrize(("made", "first_missing"), [(0, 1), (1, 3), (3, None)])
def test_the_first_missing_step_of_a_replay_is_named(
    tmp_path: Path, write_config: Config, made: int, first_missing: int | None
) -> None:
    """Steps 2 and 4 are saved; what the run has made already it does not need again."""
    if made:
        save(tmp_path / "runs" / "a", step=made)
    for step in (2, 4):
        (tmp_path / f"step_{step:06d}.jsonl").touch()
    file = write_config(tmp_path / "c.yaml")
    overrides = [
        f"run.dir={tmp_path / 'runs'}",
        "run.name=a",
        "trainer.steps=4",
        f"rollout.replay={tmp_path}",
    ]
    if first_missing is None:
        run_config(file, overrides, command="train")
        return
    with pytest.raises(MissingError, match=rf"step_00000{first_missing}\.jsonl.*steps {made + 1} to 4"):
        run_config(file, overrides, command="train")


def test_a_run_of_the_other_command_is_refused(tmp_path: Path, write_config: Config) -> None:
    save(tmp_path / "runs" / "a", step=5, command="sft")
    file, overrides = write_config(tmp_path / "c.yaml"), [f"run.dir={tmp_path / 'runs'}", "run.name=a"]
    run_config(file, overrides, command="sft")
    with pytest.raises(UserError, match=r"run of `megagspo sft`.*`megagspo train` cannot go on"):
        run_config(file, overrides, command="train")


def test_warnings_are_said_by_one_process(
    tmp_path: Path, write_config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path / "c.yaml", "algorithm: {clip_high: 0.02}", "parallel: {data: auto}")
    run_config(file, [], command="train")
    assert capsys.readouterr().err.count("warning: algorithm.clip_low") == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        run_config(file, [], command="train")
        assert capsys.readouterr().err.count("warning:") == said
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MEGAGSPO_LAUNCHED", "1")  # the launcher has said it
    run_config(file, [], command="train")
    assert capsys.readouterr().err == ""
