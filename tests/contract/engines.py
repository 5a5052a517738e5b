"""The engines that the contract suite runs against: a function for each that starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.types import Engine


def start_embedded(model_dir: Path, *, one_at_a_time: bool) -> Engine:
    """A float32 engine without weights; one_at_a_time: a second request waits until the first has ended."""
    return EmbeddedEngine(model_dir, dtype=torch.float32, max_batch_tokens=1 if one_at_a_time else 32768)


# To add an engine: a function as the one above, and its name here. It starts without weights.
ENGINES: dict[str, Callable[..., Engine]] = {"embedded": start_embedded}


def checkpoint_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint on disk, by name: what a push sends."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def push(engine: Engine, tensors: dict[str, Tensor], *, version: int) -> None:
    """A whole push, without proof."""
    engine.begin_push()
    engine.load_weights(iter(tensors.items()))
    engine.commit(version)
