from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megagspo.errors import ConfigError, DataError, NumericsError, UnwritableError
from megagspo.observe.metrics import MetricsLog, read_metrics
from megagspo.observe.progress import step_line
from megagspo.observe.run_directory import HELD, RunDirectory


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_stops_the_run_and_is_in_no_file(tmp_path: Path, value: float) -> None:
    metrics = MetricsLog(tmp_path, resume_step=0, tensorboard=False)
    metrics.write(1, {"policy/loss": 1.0})
    with pytest.raises(NumericsError, match=rf"metric policy/loss of step 2 is {value}"):
        metrics.write(2, {"reward/mean": 0.5, "policy/loss": value})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "policy/loss": 1.0}\n'


def test_a_run_that_drops_no_record_leaves_the_file_alone(tmp_path: Path) -> None:
    log(tmp_path, 0, range(1, 4))
    before = (tmp_path / "metrics.jsonl").stat()
    log(tmp_path, 3, range(0))
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before.st_ino


def test_a_run_is_not_continued_over_a_broken_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl has a line that is not JSON.*mend or remove"):
        MetricsLog(tmp_path, resume_step=3, tensorboard=False)


def test_tensorboard_reads_what_the_board_wrote_and_forgets_what_was_made_again(tmp_path: Path) -> None:
    """By TensorBoard's own reader; the second file belongs to a run continued after step 2."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, value in ((0, (1, 2, 3, 4), 1.0), (2, (3, 4, 5), 2.0)):
        metrics = MetricsLog(tmp_path, resume_step=resumed, tensorboard=True)
        for step in steps:
            metrics.write(step, {"policy/loss": value, "reward/mean": -step / 4})
        metrics.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"policy/loss", "reward/mean"}
    shown = [(event.step, event.value) for event in reader.Scalars("policy/loss")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [event.value for event in reader.Scalars("reward/mean")] == [-0.25, -0.5, -0.75, -1.0, -1.25]


def test_a_step_line_shows_only_what_the_step_has() -> None:
    assert step_line(3, 20, {"policy/loss": 0.5}) == "step  3/20  loss +5.00e-01"
    assert "held-out 0.250" in step_line(3, 20, {"eval/avg@4": 0.25})


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with (
        first.locked(),
        pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .+run\.name"),
        second.locked(),
    ):
        pass
    with second.locked():
        pass


def test_a_run_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UnwritableError, match=r"run\.dir"), RunDirectory(tmp_path / "run").locked():
        pass


def test_ranks_hold_the_lock_that_their_launcher_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are let in, and the directory stays taken until the last of them has ended, also when the launcher
    was killed; then the next run waits for it instead of failing."""
    run = RunDirectory(tmp_path)
    child = "import sys; print(flush=True); sys.stdin.read()"
    with run.locked() as lock:
        rank = subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock,)
        )
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdout.readline()
        monkeypatch.setenv(HELD, str(tmp_path))
        with run.locked():
            pass
        with RunDirectory(tmp_path / "another").locked() as own:
            assert own >= 0
        monkeypatch.delenv(HELD)
    with pytest.raises(ConfigError, match="in use"), run.locked():
        pass
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / ".lock").write_text(f"{gone.pid} {socket.gethostname()}")
    ending = threading.Timer(0.3, rank.stdin.close)
    ending.start()
    with run.locked():
        assert rank.wait(timeout=10) == 0
    ending.join()


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_goes_on_with_its_own_runs_alone(tmp_path: Path, command: str) -> None:
    run, other = RunDirectory(tmp_path), {"train": "sft", "sft": "train"}[command]
    assert run.saved_state() == {}
    checkpoint = run.checkpoints / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 2, "command": other}))
    assert run.saved_state() == {}  # not yet pointed to
    (run.checkpoints / "latest").write_text("step_000002\n")
    run.refuse_other_command(other, run.saved_state())
    with pytest.raises(ConfigError, match=rf"run of `megagspo {other}`.*another run\.name.*model\.path"):
        run.refuse_other_command(command, run.saved_state())


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
