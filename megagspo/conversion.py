"""`megagspo convert`: whole checkpoints, in one process on the CPU, through a live model of one rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megagspo.config.layout import ParallelConfig
from megagspo.convert.registry import bound_rules
from megagspo.convert.safetensors_io import HUGGING_FACE, HfCheckpoint, carry_files, write_checkpoint
from megagspo.errors import ConfigError, MissingError, writing
from megagspo.model.architecture import read_architecture, read_config
from megagspo.platform.device import pick_platform
from megagspo.platform.distributed import process_groups
from megagspo.platform.world import ALONE

if TYPE_CHECKING:
    from megagspo.policy.weights import ModelWeights

_BUCKET_BYTES = 2**28


@contextmanager
def _live_model(hf: Path, dtype: torch.dtype) -> Iterator[tuple[list[torch.nn.Module], ModelWeights]]:
    """The model that `hf/config.json` describes, weights not set, on one rank, in one chunk."""
    platform = pick_platform("cpu")
    layout = ParallelConfig().resolve(1)
    bound, dimensions = bound_rules(read_config(hf))
    with process_groups(layout, platform, ALONE, seed=0):
        from megagspo.model.build import build_model
        from megagspo.policy.weights import ModelWeights

        chunks = build_model(read_architecture(hf), layout, platform, dtype)
        yield chunks, ModelWeights(chunks, layout, bound, dimensions)


def hf_to_megatron(source: Path, destination: Path) -> None:
    """A Megatron distributed checkpoint of a Hugging Face directory, in its own number format.

    Written under a temporary name and renamed, so a crash leaves nothing that looks whole.
    """
    _refuse_existing(destination)
    checkpoint = HfCheckpoint(source)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with _writing(destination):
        partial.mkdir(parents=True)
    with _live_model(source, checkpoint[next(iter(checkpoint))].dtype) as (chunks, weights):
        from megagspo.policy.checkpoints import quiet_writers
        from megagspo.policy.megatron_checkpoint import save_weights

        weights.load(checkpoint)
        with _writing(destination), quiet_writers():
            save_weights(partial, chunks)
            carry_files(source, partial / HUGGING_FACE)
            partial.rename(destination)


def megatron_to_hf(source: Path, destination: Path, *, like: Path | None = None) -> None:
    """The Hugging Face directory of a Megatron checkpoint, the weights' number format unchanged.

    like: where config and tokenizer come from, for checkpoints that do not carry them.
    """
    _refuse_existing(destination)
    if not (source / ".metadata").is_file():
        wrong = "has no file .metadata" if source.is_dir() else "is not there"
        raise MissingError(
            f"{source} is no Megatron checkpoint, it {wrong}: give one such as "
            "runs/NAME/checkpoints/step_000010"
        )
    hf = like or source / HUGGING_FACE
    if not hf.is_dir():
        raise MissingError(f"{source} carries no Hugging Face config: give the model's directory with --like")
    pick_platform("cpu")  # before Megatron is imported
    from megagspo.policy.megatron_checkpoint import check_safe, load_weights, weights_dtype

    check_safe(source)
    with _live_model(hf, weights_dtype(source)) as (chunks, weights):
        load_weights(source, chunks)
        with _writing(destination):
            write_checkpoint(destination, weights.stream(_BUCKET_BYTES), like=hf)


def _writing(destination: Path) -> AbstractContextManager[None]:
    return writing(destination, elsewhere="give another DST", then="convert again")


def _refuse_existing(destination: Path) -> None:
    if destination.exists():
        raise ConfigError(f"{destination} exists already: remove it or give another name")
