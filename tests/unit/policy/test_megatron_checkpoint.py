"""A checkpoint's `.metadata` is a pickle that others may have written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from megagspo.errors import CheckpointError, MissingError
from megagspo.policy.megatron_checkpoint import check_safe


class Executes:
    """Pickles to a call of os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def call_by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle of protocol 4 that looks a name up in a module, dots and all, and calls what it finds."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def test_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Executes(tmp_path / "executed"), protocol=protocol))
        with pytest.raises(CheckpointError, match=r"posix\.mkdir.*not loaded"):
            check_safe(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_code_hidden_inside_a_real_record_is_refused(tmp_path: Path) -> None:
    record = torch_metadata.Metadata(state_dict_metadata={}, planner_data=Executes(tmp_path / "executed"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(record))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        check_safe(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "module",
    [
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.metadata",
        "torch",
        "pathlib",
        "collections",
    ],
)
@pytest.mark.parametrize("name", ["os.mkdir", "sys.exit", "_sys.exit", "load", "Path.mkdir"])
def test_modules_of_allowed_classes_are_no_way_to_others(tmp_path: Path, module: str, name: str) -> None:
    target = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(call_by_name(module, name, str(target)))
    with pytest.raises(CheckpointError, match="not loaded"):
        check_safe(tmp_path)
    assert not target.exists()


def test_what_a_checkpoint_needs_is_read(tmp_path: Path) -> None:
    index = torch_metadata.MetadataIndex("weight", torch.Size([0, 0]))
    properties = torch_metadata.TensorProperties(dtype=torch.bfloat16)
    chunk = torch_metadata.ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))
    tensor = torch_metadata.TensorStorageMetadata(
        properties=properties, size=torch.Size([2, 3]), chunks=[chunk]
    )
    record = torch_metadata.Metadata(state_dict_metadata={"weight": tensor}, storage_data={index: None})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(record))
    check_safe(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_damaged_metadata_is_said_to_be_damaged(tmp_path: Path, share: float) -> None:
    empty = torch_metadata.BytesStorageMetadata()
    whole = pickle.dumps(torch_metadata.Metadata(state_dict_metadata={"a" * 50: empty, "b" * 50: empty}))
    (tmp_path / ".metadata").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="damaged"):
        check_safe(tmp_path)


def test_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no \.metadata file"):
        check_safe(tmp_path)
