"""What the file system refuses becomes one message, by one helper, whoever writes."""

from __future__ import annotations

import collections
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megagspo.errors import ConfigError, DiskError, MegagspoError, UnwritableError, UserError, writing
from megagspo.observe.appended import AppendedFile
from megagspo.observe.metrics import MetricsLog, read_metrics
from megagspo.observe.run_directory import RunDirectory
from megagspo.rollout.store import read_samples, write_samples
from tests.conftest import SmallDisk
from tests.unit.rollout.test_rollout_store import samples


def fill(disk: Path) -> None:
    """Leaves not a byte."""
    space = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize))
    assert os.statvfs(disk).f_bavail == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_or_broken_is_a_failure(tmp_path: Path, number: int) -> None:
    words = r"metrics\.jsonl could not be written.*change run\.dir, then start"
    with pytest.raises(DiskError, match=words) as error, writing(tmp_path / "metrics.jsonl"):
        raise OSError(number, os.strerror(number))
    assert error.value.exit_status == 1
    assert ("MiB are free" in str(error.value)) == (number == errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM, errno.EISDIR])
def test_a_place_that_may_not_be_written_is_a_users_mistake(tmp_path: Path, number: int) -> None:
    words, place = r"hf cannot be written.*name another", tmp_path / "hf"
    with pytest.raises(UnwritableError, match=words) as error, writing(place, elsewhere="name another"):
        raise OSError(number, os.strerror(number))
    assert error.value.exit_status == 2


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a mistake"),
        ConnectionResetError(errno.ECONNRESET, "peer"),
        RuntimeError("a bug"),
        KeyboardInterrupt(),
        ValueError("Errno 28"),
    ],
)
def test_other_errors_pass_as_they_are(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run, scores = tmp_path / "file" / "run", tmp_path / "absent" / "scores.json"
    with pytest.raises(UserError, match=rf"{tmp_path}/file is a file, not a directory"), writing(run):
        run.mkdir(parents=True)
    with pytest.raises(UserError, match=rf"there is no directory {tmp_path}/absent"), writing(scores):
        scores.write_text("")


def test_libraries_that_hide_the_systems_number_are_understood(small_disk: SmallDisk) -> None:
    """safetensors and torch's zip writer raise errors of their own."""
    small_disk.remount("size=64k")
    tensors = {"a": torch.zeros(100_000)}
    for save in (save_file, torch.save):
        with pytest.raises(DiskError, match="no space left on device"), writing(small_disk.path / "out"):
            save(tensors, small_disk.path / "out")


def append(run: Path) -> None:
    MetricsLog(run, resume_step=0, tensorboard=False).write(1, {"a" * 9000: 1.0})


def board(run: Path) -> None:
    MetricsLog(run, resume_step=0, tensorboard=True)


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "metrics.jsonl": (append, "metrics.jsonl"),
    "tensorboard": (board, "tensorboard"),
    "rollouts": (lambda run: write_samples(run / "step_000001.jsonl", samples(), 1, 0), "step_000001.jsonl"),
    "config.yaml": (lambda run: RunDirectory(run).remember("a: 1\n" * 2000), "config.yaml"),
    "the lock": (lambda run: RunDirectory(run / "new").locked().__enter__(), "run directory"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_of_a_run_says_that_the_disk_is_full(small_disk: SmallDisk, writer: str) -> None:
    write, name = WRITERS[writer]
    run = small_disk.path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("b: 1\n")
    fill(small_disk.path)
    with pytest.raises(MegagspoError, match=rf"{name}.* could not be written.*no space left") as caught:
        write(run)
    assert caught.value.exit_status == 1
    assert (run / "config.yaml").read_text() == "b: 1\n"
    assert [file.name for file in run.rglob("*.tmp")] == []


def test_records_that_fit_stay_whole_when_the_next_does_not(small_disk: SmallDisk) -> None:
    small_disk.remount("size=64k")
    metrics = MetricsLog(small_disk.path, resume_step=0, tensorboard=False)
    record = {f"area/metric_{i}": i / 7 for i in range(40)}
    steps = itertools.count(1)
    with pytest.raises(DiskError, match=r"metrics\.jsonl"):
        collections.deque((metrics.write(step, record) for step in steps), maxlen=0)
    metrics.close()
    refused = next(steps) - 1
    assert refused > 10
    assert (small_disk.path / "metrics.jsonl").read_text().endswith("}\n")
    kept = [record["step"] for record in read_metrics(small_disk.path / "metrics.jsonl")]
    assert kept == list(range(1, refused))


def test_rollouts_saved_before_stay_whole_when_their_replacement_does_not_fit(small_disk: SmallDisk) -> None:
    path = small_disk.path / "rollouts" / "step_000001.jsonl"
    write_samples(path, samples(), step=1, version=0)
    fill(small_disk.path)
    with pytest.raises(DiskError, match=r"step_000001\.jsonl could not be written"):
        write_samples(path, samples() * 50, step=1, version=0)
    assert read_samples(path) == samples()


def test_a_piece_that_is_refused_leaves_the_file_as_it_was(small_disk: SmallDisk) -> None:
    file = AppendedFile(small_disk.path / "file")
    file.write(b"first\n")
    with (small_disk.path / "filler").open("wb", buffering=0) as filler:
        left = os.statvfs(small_disk.path).f_bavail * os.statvfs(small_disk.path).f_frsize
        filler.write(b"x" * (left - 8192))
    with pytest.raises(DiskError):
        file.write(b"y" * 100_000)  # of which some would fit
    file.close()
    assert (small_disk.path / "file").read_bytes() == b"first\n"
