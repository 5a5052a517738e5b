"""The names that `platform/cpu.py` redirects are still where it redirects them, and still need it."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest
import torch

from megagspo.platform import cpu

# Asked in a process that has redirected nothing.
MEGATRON = [
    "megatron.core.jit.jit_fuser",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
    "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
    "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
]
TORCH = [
    *(f"torch.cuda.{name}" for name in ("current_device", "set_device", "synchronize", "empty_cache")),
    *(f"torch.cuda.{name}" for name in ("manual_seed", "manual_seed_all", "_lazy_call")),
    *(f"torch.cuda.{name}" for name in ("get_rng_state", "set_rng_state", "Stream", "Event", "stream")),
    *(f"torch.cuda.{name}" for name in ("current_stream", "default_stream", "is_current_stream_capturing")),
    *(f"torch.cuda.{name}" for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor")),
    *(f"torch.Tensor.{name}" for name in ("cuda", "record_stream")),
    "torch.nn.Module.cuda",
]

PROBE = """
import importlib, inspect, json, sys, warnings
warnings.simplefilter("ignore")

def find(path):
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            thing = getattr(thing, name, MOVED)
        return thing

MOVED = object()
found = {path: find(path) for path in sys.argv[1:]}
parameters = lambda thing: list(inspect.signature(thing).parameters) if inspect.isfunction(thing) else []
print(json.dumps({path: parameters(thing) for path, thing in found.items() if thing is not MOVED}))
"""


@pytest.fixture(scope="module")
def untouched() -> dict[str, list[str]]:
    """The redirected names that are there before anything is redirected, and the parameters of the
    functions among them."""
    probe = [sys.executable, "-c", PROBE, *MEGATRON, *TORCH]
    done = subprocess.run(probe, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_redirected_name_is_there_before_it_is_redirected(untouched: dict[str, list[str]]) -> None:
    moved = [path for path in (*MEGATRON, *TORCH) if path not in untouched]
    assert moved == [], "a redirected name has moved: read what took its place, then change cpu.py"


@pytest.mark.parametrize("path", [*MEGATRON, *TORCH])
def test_documentation_lists_every_redirected_name(path: str) -> None:
    assert (
        path.rsplit(".", 1)[-1].removesuffix("Tensor").removeprefix("_get").removeprefix("_set")
        in cpu.__doc__
    )


@pytest.mark.parametrize("path", [path for path in MEGATRON if "moe" in path or "mappings" in path])
def test_replacements_take_the_arguments_of_what_they_replace(
    untouched: dict[str, list[str]], path: str
) -> None:
    """Megatron calls these by keyword: a new parameter must not get lost."""
    module, name = path.rsplit(".", 1)
    replacement = getattr(importlib.import_module(module), name)
    assert list(inspect.signature(replacement).parameters) == untouched[path]


def test_literal_devices_are_rewritten_inside_the_context_alone() -> None:
    with cpu.megatron_calls():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_installing_twice_changes_nothing() -> None:
    before = torch.cuda.current_device
    cpu.install()
    assert torch.cuda.current_device is before
    assert torch.cuda.current_device() == torch.device("cpu")


def test_nothing_of_megatron_is_compiled() -> None:
    from megatron.core.jit import jit_fuser

    def function(x: int) -> int:
        return x

    assert jit_fuser(function) is function


def test_random_state_is_the_cpus() -> None:
    from megatron.core.tensor_parallel import random

    state = random._get_cuda_rng_state()
    first = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
