"""A policy's state as a Megatron distributed checkpoint: files that any layout can load.

Megatron's files are not free of pickle. Before a checkpoint is loaded, its `.metadata` is read by an
unpickler that knows only the classes a checkpoint needs, and torch loads all else with `weights_only`; what
they refuse is named.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from megagspo.errors import CheckpointError, MissingError
from megagspo.policy import optimizer_state

# Optimizer state in the shape of the parameters, whatever the data-parallel size: what lets another layout
# load it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

_COMMON = "common.pt"
"""Megatron's file of plain values."""

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


def save_state(directory: Path, chunks: Sequence[Any], optimizer: Any, counters: dict[str, int]) -> None:
    """Writes weights, optimizer state and counters. Called by all ranks; the directory is there and empty."""
    _save(directory, _sharded_state(chunks, optimizer, loading=False), {"counters": counters})


def load_state(directory: Path, chunks: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Sets weights and optimizer state from a checkpoint written in any layout; returns the counters."""
    state = _load(directory, _sharded_state(chunks, optimizer, loading=True))
    with _quiet():
        _set_model(chunks, state["model"])
        counters = {name: int(value) for name, value in state["counters"].items()}
        optimizer_state.load_state(optimizer, state["optimizer"], updates=counters["updates"])
    return counters


def save_weights(directory: Path, chunks: Sequence[Any]) -> None:
    """Writes the weights alone: what `convert hf-to-megatron` makes."""
    _save(directory, {"model": _model_state(chunks)}, {})


def load_weights(directory: Path, chunks: Sequence[Any]) -> None:
    """Sets the weights alone, from a checkpoint with or without optimizer state."""
    _set_model(chunks, _load(directory, {"model": _model_state(chunks)})["model"])


def _save(directory: Path, sharded: dict[str, Any], plain: dict[str, Any]) -> None:
    """Writes sharded tensors and plain values where every Megatron version finds them.

    0.16 keeps plain values in common.pt and looks nowhere else. 0.19 keeps them among the sharded tensors,
    and looks there when there is no common.pt.
    """
    with _quiet():
        dist_checkpointing.save({**sharded, **plain}, str(directory))
    common = directory / _COMMON
    if dist.get_rank() == 0 and not common.exists():
        torch.save(plain, common)


def _load(directory: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """What is wanted, from a checkpoint found safe. Raises CheckpointError for one that is not."""
    check_safe(directory)
    try:
        with _quiet(), _weights_only():
            return dist_checkpointing.load(wanted, str(directory))
    except CheckpointingException as error:
        raise CheckpointError(f"{directory} does not fit the model: {str(error).splitlines()[0]}") from error
    except (pickle.UnpicklingError, CheckpointException) as error:
        if (refused := _refusal(error)) is None:
            raise
        raise CheckpointError(
            f"{directory} holds more than tensors and plain values: not loaded. "
            f"Use a checkpoint from a source you trust. ({str(refused).splitlines()[0]})"
        ) from error


@contextmanager
def _weights_only() -> Iterator[None]:
    """Has torch read tensors and plain values alone. Its own loader asks for everything where a checkpoint
    holds an object among its tensors, as those of Megatron 0.19 do."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _refusal(error: BaseException) -> pickle.UnpicklingError | None:
    """What torch's weights_only said, itself or from within the error that its checkpointing wraps around."""
    inside = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    refusals = (cause for cause in (error, *inside) if isinstance(cause, pickle.UnpicklingError))
    return next(refusals, None)


def weights_dtype(directory: Path) -> torch.dtype:
    """The number format of the weights in a checkpoint, from its metadata."""
    embedding = _read_metadata(directory).state_dict_metadata["embedding.word_embeddings.weight"]
    return embedding.properties.dtype


def _model_state(chunks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The model's sharded tensors, chunk by chunk; in the checkpoint each has its name in the whole model.
    Its sharded objects, the `_extra_state` of linear layers, stay out: they are empty without FP8, and torch
    would unpickle what another's checkpoint has in their place."""
    state = {}
    for number, chunk in enumerate(chunks):
        sharded = chunk.sharded_state_dict(metadata=dict(_METADATA))
        state[f"chunk{number}"] = {
            name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)
        }
    return state


def _set_model(chunks: Sequence[Any], state: Mapping[str, dict[str, Any]]) -> None:
    for number, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(state[f"chunk{number}"], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        assert [*missing, *unexpected] == [], f"missing {missing}, unexpected {unexpected}"


def _sharded_state(chunks: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    sharded = _model_state(chunks)
    return {
        "model": sharded,
        "optimizer": optimizer_state.sharded_state(optimizer, sharded, dict(_METADATA), loading=loading),
    }
