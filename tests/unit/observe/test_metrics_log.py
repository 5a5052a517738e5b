from __future__ import annotations

import json
from pathlib import Path

import pytest

from megagspo.errors import ConfigError
from megagspo.observe.metrics import MetricsLog, read_metrics
from megagspo.observe.progress import step_line
from megagspo.observe.run_directory import RunDirectory


def log(directory: Path, resume_step: int, steps: range) -> None:
    metrics = MetricsLog(directory, resume_step=resume_step, tensorboard=False)
    for step in steps:
        metrics.write(step, {"policy/loss": step / 7})
    metrics.close()


def test_an_interrupted_run_leaves_the_file_of_one_that_was_not(tmp_path: Path) -> None:
    whole, interrupted = tmp_path / "a", tmp_path / "b"
    for directory in (whole, interrupted):
        directory.mkdir()
    log(whole, 0, range(1, 9))
    log(interrupted, 0, range(1, 7))  # killed in step 7; the newest checkpoint is that of step 4
    log(interrupted, 4, range(5, 9))
    assert (whole / "metrics.jsonl").read_bytes() == (interrupted / "metrics.jsonl").read_bytes()


def test_a_last_line_cut_short_is_forgotten_and_a_broken_line_before_it_is_not(tmp_path: Path) -> None:
    log(tmp_path, 0, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[:-5])
    assert [record["step"] for record in read_metrics(file)] == [1, 2]
    file.write_text("{broken\n" + text)
    with pytest.raises(json.JSONDecodeError):
        read_metrics(file)


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 1 / 3}
    metrics = MetricsLog(tmp_path, resume_step=0, tensorboard=False)
    metrics.write(1, values)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == {"step": 1, **values}


def test_a_step_line_shows_only_what_the_step_has() -> None:
    assert step_line(3, 20, {"policy/loss": 0.5}) == "step  3/20  loss +5.00e-01"
    assert "held-out 0.250" in step_line(3, 20, {"eval/avg@4": 0.25})


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with (
        first.locked(),
        pytest.raises(ConfigError, match=r"in use by process \d+.*run\.name"),
        second.locked(),
    ):
        pass
    with second.locked():
        pass


def test_a_run_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"), RunDirectory(tmp_path / "run").locked():
        pass


def test_a_run_started_again_with_other_settings_says_what_changed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.remember("optimizer: {lr: 0.1, betas: [0.9, 0.95]}\nrun: {seed: 0}\n") == []
    assert run.remember("optimizer: {lr: 0.2, betas: [0.9, 0.95]}\nrun: {seed: 0}\n") == [
        "optimizer.lr was 0.1, is now 0.2"
    ]
    assert run.remember("optimizer: {lr: 0.2, betas: [0.9, 0.99]}\n") == [
        "optimizer.betas was [0.9, 0.95], is now [0.9, 0.99]",
        "run.seed was 0, is now not set",
    ]
