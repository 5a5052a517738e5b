"""Hugging Face checkpoint directories: reading tensors one by one, writing them sharded, carrying the other
files along."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megagspo.errors import MissingError, ModelError

INDEX = "model.safetensors.index.json"
HUGGING_FACE = "huggingface"
"""The folder of a Megatron checkpoint that holds the Hugging Face config and tokenizer files of its model."""

_CARRIED = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
_CARRIED_GLOBS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
)


class HfCheckpoint(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory by name, read when asked for, memory-mapped.

    The map of names comes from the files' own headers, so a directory without an index works and a wrong
    index is noticed.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise MissingError(
                f"{directory} holds no .safetensors file: give a Hugging Face directory with its weights"
            )
        self._file_of: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 - not a mapping
                        if name in self._file_of:
                            raise ModelError(
                                f"{directory}: {name} is in both {self._file_of[name].name} and {file.name}: "
                                "remove the file that does not belong there"
                            )
                        self._file_of[name] = file
            except SafetensorError as error:
                raise ModelError(
                    f"{file} is not a whole safetensors file ({error}): copy it again"
                ) from error
        self._check_index()

    def _check_index(self) -> None:
        index = self.directory / INDEX
        if not index.is_file():
            return
        try:
            listed = set(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(
                f"{index} is not a safetensors index ({error!r}): copy it again, or remove it"
            ) from error
        missing = sorted(listed - set(self._file_of))
        if missing:
            raise ModelError(
                f"{index} lists tensors that no shard holds (is a shard missing?): {', '.join(missing)}: "
                "copy the model's files again"
            )

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def write_checkpoint(
    destination: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    like: str | Path,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a Hugging Face directory: tensors in shards with an exact index, other files carried over from
    `like` unchanged.

    Written under a temporary name, fsynced and renamed: a crash leaves no directory that looks whole. An
    existing destination is replaced.
    """
    destination = Path(destination)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    carry_files(Path(like), partial)
    names: list[list[str]] = []  # of each shard written
    shard: dict[str, Tensor] = {}
    size = total = 0
    # A shard is on disk before the next is gathered. Names hold the number of shards: they come at the end.
    dtype = None
    for name, tensor in tensors:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        bytes_ = tensor.numel() * tensor.element_size()
        if shard and size + bytes_ > max_shard_bytes:
            names.append(_write_shard(partial, len(names), shard))
            shard, size = {}, 0
        # Hugging Face checkpoints are contiguous and share no storage between tensors.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += bytes_
        total += bytes_
    names.append(_write_shard(partial, len(names), shard))
    _name_shards(partial, names, total)
    _declare_dtype(partial / "config.json", dtype)
    fsync_tree(partial)
    replace_directory(partial, destination)


def _declare_dtype(config: Path, dtype: str | None) -> None:
    """Makes config.json name the number format the tensors really have: transformers casts to what it
    says."""
    settings = json.loads(config.read_text())
    declared = {key: dtype for key in ("dtype", "torch_dtype") if settings.get(key, dtype) != dtype}
    if declared:
        config.write_text(json.dumps(settings | declared, indent=2) + "\n")


def _write_shard(directory: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, directory / f"shard-{number}", metadata={"format": "pt"})
    return list(tensors)


def _name_shards(directory: Path, names: list[list[str]], total: int) -> None:
    """Gives shards their final names, and writes the index when there are several."""
    if len(names) == 1:
        os.replace(directory / "shard-0", directory / "model.safetensors")
        return
    weight_map = {}
    for number, members in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        os.replace(directory / f"shard-{number}", directory / file)
        weight_map.update(dict.fromkeys(members, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def carry_files(source: Path, destination: Path) -> None:
    """Copies config, generation config, tokenizer and chat template byte for byte. A file that is absent
    stays absent; one that is not JSON although its name says so is a ModelError."""
    destination.mkdir(exist_ok=True)
    carried = {source / name for name in _CARRIED} | {f for glob in _CARRIED_GLOBS for f in source.glob(glob)}
    for file in sorted(carried):
        if not file.is_file():
            continue
        if file.suffix == ".json":
            try:
                json.loads(file.read_text())
            except json.JSONDecodeError as error:
                raise ModelError(f"{file} is not valid JSON ({error}): copy it again") from error
        shutil.copyfile(file, destination / file.name)


def fsync_tree(directory: Path) -> None:
    """Forces every file below a directory, and the directories themselves, to disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(root))


def replace_directory(partial: Path, destination: Path) -> None:
    """Gives a finished directory its name. What had the name before is moved aside first and removed last, so
    that a crash in between loses neither."""
    aside = destination.with_name(destination.name + ".replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if destination.exists():
        os.replace(destination, aside)
    os.replace(partial, destination)
    fsync_directory(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def fsync_directory(directory: Path) -> None:
    """Forces a directory's entries (a rename in it) to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
