"""Hugging Face directories: what is read, what is written, and what a crash leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megagspo.convert.safetensors_io import INDEX, HfCheckpoint, write_checkpoint
from megagspo.errors import MissingError, ModelError

TENSORS = {
    "c": torch.randn(4, 8),
    "a": torch.randn(3, dtype=torch.bfloat16),
    "b": torch.arange(6).reshape(2, 3),
    "scalar": torch.tensor(1.5),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with the files that lie beside the weights."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"eos_token_id": 151643}')
    (directory / "generation_config.json").write_text('{ "eos_token_id": [151643,\n 151645] }')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    (directory / "merges.txt").write_text("a b\n")
    return directory


def written(directory: Path) -> dict[str, Tensor]:
    checkpoint = HfCheckpoint(directory)
    return {name: checkpoint[name] for name in checkpoint}


def assert_holds_all(directory: Path) -> None:
    tensors = written(directory)
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_single_file_without_index_is_read(tmp_path: Path) -> None:
    """B5."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds_all(tmp_path)


def test_single_shard_has_no_index(tmp_path: Path, source: Path) -> None:
    write_checkpoint(tmp_path / "out", TENSORS.items(), like=source)
    assert_holds_all(tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}  # transformers refuses a file without it


@pytest.mark.parametrize("limit", [1, 48, 140])
def test_index_is_exact_for_every_shard_size(tmp_path: Path, source: Path, limit: int) -> None:
    destination = tmp_path / "out"
    write_checkpoint(destination, TENSORS.items(), like=source, max_shard_bytes=limit)
    assert_holds_all(destination)
    index = json.loads((destination / INDEX).read_text())
    files = sorted(destination.glob("*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
            sizes = [
                handle.get_tensor(name).numel() * handle.get_tensor(name).element_size() for name in names
            ]
        assert len(names) == 1 or sum(sizes) <= limit
        found.update(dict.fromkeys(names, file.name))
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_tensors_that_share_storage_are_written_apart(tmp_path: Path, source: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"rows": whole[1:], "transposed": whole.T, "all": whole}
    write_checkpoint(tmp_path / "out", views.items(), like=source)
    assert all(torch.equal(tensor, views[name]) for name, tensor in written(tmp_path / "out").items())


def test_files_beside_the_weights_are_carried_unchanged(tmp_path: Path, source: Path) -> None:
    """B13: byte for byte; a generation config is never made from config.json."""
    write_checkpoint(tmp_path / "out", TENSORS.items(), like=source)
    for file in source.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_absent_file_stays_absent(tmp_path: Path, source: Path) -> None:
    (source / "generation_config.json").unlink()
    write_checkpoint(tmp_path / "out", TENSORS.items(), like=source)
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_configuration_is_an_error(tmp_path: Path, source: Path, name: str) -> None:
    """B13."""
    (source / name).write_text('{"eos_token_id": [151643,')
    with pytest.raises(ModelError, match=name):
        write_checkpoint(tmp_path / "out", TENSORS.items(), like=source)
    assert not (tmp_path / "out").exists()


def test_write_that_fails_leaves_what_was_there_and_the_next_one_succeeds(
    tmp_path: Path, source: Path
) -> None:
    destination = tmp_path / "out"
    write_checkpoint(destination, TENSORS.items(), like=source)

    def cut_short() -> Iterator[tuple[str, Tensor]]:
        yield "c", torch.zeros(4, 8)
        raise RuntimeError("a rank went away")

    with pytest.raises(RuntimeError, match="a rank went away"):
        write_checkpoint(destination, cut_short(), like=source, max_shard_bytes=1)
    assert_holds_all(destination)
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    write_checkpoint(destination, changed.items(), like=source)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in written(destination).items())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


def test_write_that_fails_leaves_no_directory_that_looks_whole(tmp_path: Path, source: Path) -> None:
    def cut_short() -> Iterator[tuple[str, Tensor]]:
        yield from list(TENSORS.items())[:2]
        raise RuntimeError("a rank went away")

    with pytest.raises(RuntimeError):
        write_checkpoint(tmp_path / "out", cut_short(), like=source)
    assert not (tmp_path / "out").exists()


def test_directory_may_be_written_over_itself(tmp_path: Path, source: Path) -> None:
    write_checkpoint(source, TENSORS.items(), like=source)
    assert_holds_all(source)
    assert json.loads((source / "generation_config.json").read_text())["eos_token_id"] == [151643, 151645]


def test_lost_shard_is_noticed(tmp_path: Path, source: Path) -> None:
    write_checkpoint(tmp_path / "out", TENSORS.items(), like=source, max_shard_bytes=1)
    lost = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]["b"]
    (tmp_path / "out" / lost).unlink()
    with pytest.raises(ModelError, match=r"no shard holds.*: b"):
        HfCheckpoint(tmp_path / "out")


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-7])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole"):
        HfCheckpoint(tmp_path)


def test_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"a is in both one\.safetensors and two\.safetensors"):
        HfCheckpoint(tmp_path)


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no \.safetensors file"):
        HfCheckpoint(tmp_path)
