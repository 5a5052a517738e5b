"""Checkpoint directories: whole or not at all, and the newest whole one is found (E3)."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from megagspo.errors import CheckpointError
from megagspo.policy.checkpoints import CheckpointDirectory


def directory(root: Path, *, keep: int = 10) -> CheckpointDirectory:
    return CheckpointDirectory(root / "checkpoints", keep=keep, rank=0, barrier=lambda: None)


def write(target: Path) -> None:
    (target / "weights").mkdir()
    (target / "weights" / "0.distcp").write_bytes(b"0123456789")
    (target / ".metadata").write_bytes(b"metadata")


def newest(checkpoints: CheckpointDirectory) -> tuple[int | None, list[str]]:
    warnings: list[str] = []
    found = checkpoints.newest(warnings.append)
    return (found.step if found else None), warnings


@pytest.fixture
def ten_and_twenty(tmp_path: Path) -> CheckpointDirectory:
    checkpoints = directory(tmp_path)
    for step in (10, 20):
        checkpoints.save(step, write, {"data": {"position": step}})
    return checkpoints


def test_newest_whole_checkpoint_is_found_with_its_state(ten_and_twenty: CheckpointDirectory) -> None:
    warnings: list[str] = []
    found = ten_and_twenty.newest(warnings.append)
    assert found is not None
    assert (found.step, found.state(), warnings) == (20, {"data": {"position": 20}}, [])
    assert (ten_and_twenty.root / "latest").read_text().strip() == "step_000020"


@pytest.mark.parametrize(
    "damage", ["truncated", "longer", "no weights", "no state", "no metadata", "no manifest"]
)
def test_damaged_checkpoint_is_passed_over_with_a_warning(
    ten_and_twenty: CheckpointDirectory, damage: str
) -> None:
    broken = ten_and_twenty.root / "step_000020"
    weights = broken / "weights" / "0.distcp"
    if damage == "truncated":
        weights.write_bytes(b"01234")
    elif damage == "longer":
        weights.write_bytes(b"0123456789ab")
    else:
        lost = {"no weights": weights, "no state": broken / "state.json", "no metadata": broken / ".metadata"}
        lost.get(damage, broken / "manifest.json").unlink()
    step, warnings = newest(ten_and_twenty)
    assert step == 10
    assert len(warnings) == 1
    assert "step_000020" in warnings[0]


def test_pointer_alone_decides_nothing(ten_and_twenty: CheckpointDirectory) -> None:
    shutil.rmtree(ten_and_twenty.root / "step_000020")
    assert (ten_and_twenty.root / "latest").read_text().strip() == "step_000020"
    assert newest(ten_and_twenty) == (10, [])


def test_partial_directory_is_never_loaded_and_saving_again_succeeds(tmp_path: Path) -> None:
    checkpoints = directory(tmp_path)
    checkpoints.save(10, write, {})

    def crash(target: Path) -> None:
        write(target)
        (target / "left over").write_bytes(b"x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        checkpoints.save(20, crash, {})
    assert (checkpoints.root / "step_000020.partial").is_dir()
    assert newest(checkpoints) == (10, [])
    assert (checkpoints.root / "latest").read_text().strip() == "step_000010"
    checkpoints.save(20, write, {})
    assert newest(checkpoints) == (20, [])
    assert not (checkpoints.root / "step_000020.partial").exists()
    assert not (checkpoints.root / "step_000020" / "left over").exists()


def test_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(
    ten_and_twenty: CheckpointDirectory,
) -> None:
    (ten_and_twenty.root / "step_000020" / "state.json").unlink()
    ten_and_twenty.save(20, write, {"again": True})
    assert newest(ten_and_twenty) == (20, [])


def test_disk_that_refuses_is_a_checkpoint_error_and_harms_nothing(
    ten_and_twenty: CheckpointDirectory,
) -> None:
    def full(target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError,
        match=r"step_000030.*no space left.* MiB are free.*make room.*Earlier checkpoints are untouched",
    ):
        ten_and_twenty.save(30, full, {})
    assert newest(ten_and_twenty) == (20, [])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = directory(tmp_path, keep=2)
    for step in (1, 2, 3, 1000000):
        checkpoints.save(step, write, {})
    kept = sorted(entry.name for entry in checkpoints.root.iterdir() if entry.is_dir())
    assert kept == ["step_000003", "step_1000000"]


def test_damaged_checkpoint_does_not_take_the_place_of_the_one_just_saved(tmp_path: Path) -> None:
    """keep=1 and the only checkpoint damaged: the run starts over, and its next one has a lower step."""
    checkpoints = directory(tmp_path, keep=1)
    checkpoints.save(20, write, {})
    (checkpoints.root / "step_000020" / ".metadata").unlink()
    checkpoints.save(10, write, {})
    assert newest(checkpoints)[0] == 10


def test_damaged_checkpoint_goes_with_the_whole_ones_of_its_age(ten_and_twenty: CheckpointDirectory) -> None:
    (ten_and_twenty.root / "step_000010" / ".metadata").unlink()
    directory(ten_and_twenty.root.parent, keep=2).save(30, write, {})
    assert not (ten_and_twenty.root / "step_000010").exists()
    assert (ten_and_twenty.root / "step_000020").exists()


def test_other_entries_are_left_alone(tmp_path: Path) -> None:
    checkpoints = directory(tmp_path, keep=1)
    for name in ("step_final", "notes", "step_000005.copy"):
        (checkpoints.root / name).mkdir(parents=True)
    checkpoints.save(10, write, {})
    assert newest(checkpoints) == (10, [])
    assert {"step_final", "notes", "step_000005.copy"} <= {entry.name for entry in checkpoints.root.iterdir()}


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert newest(directory(tmp_path)) == (None, [])


def test_ranks_other_than_the_first_touch_no_names(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step_000010.partial"
    target.mkdir(parents=True)
    other = CheckpointDirectory(tmp_path / "checkpoints", keep=1, rank=1, barrier=lambda: None)
    other.save(10, lambda directory: (directory / "1.distcp").touch(), {})
    assert sorted(entry.name for entry in target.iterdir()) == ["1.distcp"]


def test_cause_is_named_where_megatron_logs_it_and_raises_less(ten_and_twenty: CheckpointDirectory) -> None:
    """As the writers of Megatron-Core 0.19 do."""

    def full(target: Path) -> None:
        writers = logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async")
        writers.error("Local worker 0 encountered an error: [Errno 28] No space left on device")
        raise RuntimeError("Worker failure: <class 'OSError'>")

    with pytest.raises(CheckpointError, match=r"no space left on device.*make room there"):
        ten_and_twenty.save(30, full, {})
    assert newest(ten_and_twenty) == (20, [])
