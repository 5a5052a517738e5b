"""A policy's state as a Megatron distributed checkpoint: files that any layout can load.

Megatron's files are not free of pickle. Before a checkpoint is loaded, its `.metadata` is read by an
unpickler that knows only the classes a checkpoint needs, and torch loads `common.pt` with `weights_only`;
what they refuse is named.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megagspo.errors import CheckpointError, MissingError
from megagspo.policy import optimizer_state

# Optimizer state in the shape of the parameters, whatever the data-parallel size: what lets another layout
# load it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

# Names, not modules: pickle would look up `os.system` in any module that imports os.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "torch.serialization": ("_get_layout",),
    "torch": (
        *("Size", "device", "strided"),
        *("float64", "float32", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "bool"),
    ),
}


class _RefusedError(pickle.UnpicklingError):
    """A pickle asks for something that is not in `_CLASSES`."""


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every class and function that a checkpoint's `.metadata` does not need."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name}")


def check_safe(directory: Path) -> None:
    """Raises when the checkpoint is not there or its metadata would run code of others."""
    _read_metadata(directory)


def _read_metadata(directory: Path) -> Any:
    metadata = directory / ".metadata"
    if not metadata.is_file():
        raise MissingError(f"{directory} is not a Megatron distributed checkpoint: it has no .metadata file")
    with metadata.open("rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except _RefusedError as error:
            raise CheckpointError(
                f"{metadata} asks for {error}, which no Megatron checkpoint needs: not loaded. "
                "Use a checkpoint from a source you trust, or convert one from Hugging Face files"
            ) from error
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{metadata} is damaged ({error}): use an older checkpoint") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron and torch warn about their own internals while saving and loading; none of it is for the
    user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def save_state(directory: Path, model: Any, optimizer: Any, counters: dict[str, int]) -> None:
    """Writes weights, optimizer state and counters. Called by all ranks; the directory is there and empty."""
    with _quiet():
        dist_checkpointing.save(_sharded_state(model, optimizer, counters, loading=False), str(directory))


def load_state(directory: Path, model: Any, optimizer: Any) -> dict[str, int]:
    """Sets weights and optimizer state from a checkpoint written in any layout; returns the counters."""
    check_safe(directory)
    with _quiet():
        state = dist_checkpointing.load(_sharded_state(model, optimizer, {}, loading=True), str(directory))
        model.load_state_dict(state["model"])
        counters = {name: int(value) for name, value in state["counters"].items()}
        optimizer_state.load_state(optimizer, state["optimizer"], updates=counters["updates"])
    return counters


def save_weights(directory: Path, model: Any) -> None:
    """Writes the weights alone: what `convert hf-to-megatron` makes."""
    with _quiet():
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=dict(_METADATA))}, str(directory))


def load_weights(directory: Path, model: Any) -> None:
    """Sets the weights alone, from a checkpoint with or without optimizer state."""
    check_safe(directory)
    with _quiet():
        state = dist_checkpointing.load(
            {"model": model.sharded_state_dict(metadata=dict(_METADATA))}, str(directory)
        )
        model.load_state_dict(state["model"])


def weights_dtype(directory: Path) -> torch.dtype:
    """The number format of the weights in a checkpoint, from its metadata."""
    embedding = _read_metadata(directory).state_dict_metadata["model.embedding.word_embeddings.weight"]
    return embedding.properties.dtype


def _sharded_state(model: Any, optimizer: Any, counters: dict[str, int], *, loading: bool) -> dict[str, Any]:
    sharded = model.sharded_state_dict(metadata=dict(_METADATA))
    return {
        "model": sharded,
        "optimizer": optimizer_state.sharded_state(optimizer, sharded, dict(_METADATA), loading=loading),
        "counters": counters,
    }
