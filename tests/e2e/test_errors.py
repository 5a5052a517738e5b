"""What the commands answer to mistakes and to a disk that refuses: one message that names the thing, the
place and the remedy, and nothing that was saved before is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import SmallDisk
from tests.e2e.conftest import ROOT
from tests.e2e.mistakes import MISTAKES, filled, train

Command = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Answer:
    status: int
    stdout: str
    stderr: str

    def assert_one_message(self, expected: list[str], *, status: int) -> None:
        shown = self.stdout + self.stderr
        assert self.status == status, shown
        assert "Traceback" not in shown
        assert self.stderr.startswith("error: "), shown
        assert shown.count("error:") == 1 == self.stderr.count("\n"), shown
        for words in expected:
            assert words in self.stderr, shown


@pytest.fixture
def typed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], Answer]:
    """Runs a command in this very process, by the command line's own `main`: these mistakes are found before
    ranks are started and Megatron is built, and a process for each would take minutes."""

    def run(words: list[str]) -> Answer:
        from megagspo.cli import main

        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["megagspo", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def runs(megagspo: Command, tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has made its two steps on two ranks."""
    runs = tmp_path_factory.mktemp("runs")
    words = filled(train("parallel.expert=2", "trainer.steps=2"), model=tiny_moe_dir, runs=runs)
    megagspo(*words)
    return runs


def contents(run: Path) -> dict[str, str]:
    """Every file of a run but its lock, by a digest of its bytes."""
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


@pytest.fixture
def untouched(runs: Path) -> Iterator[None]:
    """Whatever the test does, the finished run stays as it is, to the byte."""
    before = contents(runs / "finished")
    assert {"metrics.jsonl", "config.yaml", "checkpoints/latest", "logs/rank_001.log"} < set(before)
    yield
    assert contents(runs / "finished") == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_message_and_status_2(
    typed: Callable[[list[str]], Answer], runs: Path, tiny_moe_dir: Path, tmp_path: Path, mistake: str
) -> None:
    words, expected, prepare = MISTAKES[mistake]
    if prepare:
        prepare(tmp_path, tiny_moe_dir)
    places = {"model": tiny_moe_dir, "runs": runs, "tmp": tmp_path}
    typed(filled(words, **places)).assert_one_message(filled(expected, **places), status=2)
    assert not (runs / "other").exists()


def test_a_mistake_that_only_ranks_can_see_is_said_once(
    megagspo: Command, runs: Path, tiny_moe_dir: Path, untouched: None
) -> None:
    words = train("parallel.expert=2", "data.prompt_length_max=3")
    result = megagspo(*filled(words, model=tiny_moe_dir, runs=runs), check=False)
    answer = Answer(result.returncode, result.stdout, result.stderr)
    answer.assert_one_message(["prompt held_out/", "data.prompt_length_max=3"], status=2)


def test_fewer_steps_than_the_run_has_made_are_nothing_to_do(
    typed: Callable[[list[str]], Answer], runs: Path, tiny_moe_dir: Path, untouched: None
) -> None:
    answer = typed(filled(train("trainer.steps=1"), model=tiny_moe_dir, runs=runs))
    assert (answer.status, answer.stderr) == (0, "")
    assert "has made 2 steps already" in answer.stdout
    assert "trainer.steps=1" in answer.stdout
    assert "nothing to do" in answer.stdout


def test_a_second_run_in_one_directory_is_refused_and_the_first_goes_on(
    typed: Callable[[list[str]], Answer], tiny_moe_dir: Path, tmp_path: Path
) -> None:
    words = filled(train("parallel.expert=2", "trainer.steps=6"), model=tiny_moe_dir, runs=tmp_path)
    run = tmp_path / "finished"
    first = subprocess.Popen(
        [sys.executable, "-m", "megagspo", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 200
        while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        logs = {file.name: file.read_bytes() for file in (run / "logs").iterdir()}
        holder = f"in use by process {first.pid} on {socket.gethostname()}"
        # Both ways of starting: ranks of its own, with more logs than there are, and this process alone.
        for layout in ("parallel.expert=4", "parallel.expert=1"):
            typed([*words, layout]).assert_one_message([str(run), holder, "another run.name"], status=2)
        assert {file.name: file.read_bytes() for file in (run / "logs").iterdir()} == logs
        assert first.wait(timeout=200) == 0, first.communicate()[0]
    finally:
        first.kill()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 7))


# --- disks --------------------------------------------------------------------------------------------------


def test_a_read_only_place_is_a_mistake(
    typed: Callable[[list[str]], Answer], runs: Path, tiny_moe_dir: Path, small_disk: SmallDisk
) -> None:
    """Root may write where permissions say no, but not on a disk mounted read-only."""
    small_disk.remount("size=200m")
    shutil.copytree(runs / "finished", small_disk.path / "finished")
    before = contents(small_disk.path / "finished")
    small_disk.remount("ro")
    words = filled(train(), model=tiny_moe_dir, runs=small_disk.path)
    expected = [f"run directory {small_disk.path}/finished cannot be written", "read-only", "change run.dir"]
    typed(words).assert_one_message(expected, status=2)
    assert contents(small_disk.path / "finished") == before


def test_a_full_disk_while_a_checkpoint_is_saved_keeps_the_one_before(
    megagspo: Command, tiny_moe_dir: Path, small_disk: SmallDisk
) -> None:
    words = train("parallel.expert=2", "trainer.steps=4", "checkpoint.save_hf=false")
    result = megagspo(*filled(words, model=tiny_moe_dir, runs=small_disk.path), check=False)
    answer = Answer(result.returncode, result.stdout, result.stderr)
    checkpoints = small_disk.path / "finished" / "checkpoints"
    expected = [f"{checkpoints}/step_000002 could not be written", "make room", "checkpoints are untouched"]
    answer.assert_one_message(expected, status=1)
    assert (checkpoints / "latest").read_text().strip() == "step_000001"


def test_a_full_disk_while_exporting_keeps_the_checkpoint_and_the_run_goes_on(
    megagspo: Command, tiny_moe_dir: Path, small_disk: SmallDisk
) -> None:
    small_disk.remount("size=34m")  # the checkpoint has 30 MiB, the export 8
    words = filled(train("trainer.steps=1"), model=tiny_moe_dir, runs=small_disk.path)
    result = megagspo(*words, check=False)
    answer = Answer(result.returncode, result.stdout, result.stderr)
    run = small_disk.path / "finished"
    expected = [
        f"{run}/hf could not be written",
        "no space left on device",
        "MiB are free",
        "start the run again",
    ]
    answer.assert_one_message(expected, status=1)
    assert not (run / "hf").exists()
    metrics = (run / "metrics.jsonl").read_bytes()
    small_disk.remount("size=60m")
    megagspo(*words)
    assert (run / "hf" / "model.safetensors").is_file()
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_full_disk_while_converting_leaves_nothing_that_looks_whole(
    megagspo: Command, runs: Path, tiny_moe_dir: Path, small_disk: SmallDisk, direction: str
) -> None:
    small_disk.remount("size=2m")
    source = (
        tiny_moe_dir if direction == "hf-to-megatron" else runs / "finished" / "checkpoints" / "step_000002"
    )
    result = megagspo("convert", direction, source, small_disk.path / "out", check=False)
    answer = Answer(result.returncode, result.stdout, result.stderr)
    answer.assert_one_message([f"{small_disk.path}/out could not be written", "another DST"], status=1)
    assert not (small_disk.path / "out").exists()
