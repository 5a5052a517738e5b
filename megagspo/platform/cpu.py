"""Megatron-Core on a machine without CUDA: the one place of the package that changes foreign code.

Megatron-Core's modules, data parallelism, optimizers, schedules and checkpoints are ordinary torch programs;
what ties them to CUDA is a handful of names. `install()` redirects those names, once, before anything of
Megatron is built, and only when the platform is a CPU. `megatron_calls()` is the context in which Megatron
code that spells a device as a literal runs.

Replaced for the life of the process (`install`):

| name | why |
|---|---|
| `torch.cuda.current_device` | Megatron passes it as `device=`; gives `torch.device("cpu")` |
| `torch.cuda.{set_device, synchronize, empty_cache, manual_seed, manual_seed_all, _lazy_call}` | device bookkeeping; no-ops |
| `torch.cuda.{get_rng_state, set_rng_state}`, `megatron...random.{_get,_set}_cuda_rng_state` | the CPU's generator state |
| `torch.cuda.{Stream, Event, stream, current_stream, default_stream, is_current_stream_capturing}` | inert: CPU work is in order |
| `torch.cuda.{Float, Half, BFloat16}Tensor` | buffer type lookups; the CPU types |
| `megatron.core.jit.jit_fuser` | is `torch.compile`, which would run a compiler in the first step; the identity |
| `torch.Tensor.{cuda, record_stream}`, `torch.nn.Module.cuda` | already where they have to be |
| `megatron...moe_utils.maybe_move_tensor_to_cpu` (and in `token_dispatcher`) | returns CPU tensors unchanged although its caller needs numpy split sizes |
| `megatron...moe_utils.te_general_gemm` | undefined in 0.16 without TransformerEngine; None, as in 0.19, selects the torch path |
| `megatron...filesystem_async._results_queue` | Megatron starts a manager process for it, which takes two seconds and outlives a killed rank; saves are synchronous here, so an ordinary queue does |
| `megatron...mappings.{_gather_along_first_dim, _reduce_scatter_along_first_dim}` | gloo wants equal sizes: uneven token counts of expert tensor parallel are padded |

Rewritten on the fly inside `megatron_calls()`, by a `TorchFunctionMode`: the literal `device="cuda"`,
`pin_memory=True`, and the string that `tensor.type()` gives (Megatron's optimizers compare it with
`torch.cuda.FloatTensor`).

`tests/unit/platform/test_cpu.py` fails when a Megatron version moves one of these names.
"""  # noqa: E501 - a table row is one line

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Inert:
    """Stands for a stream or an event: accepts every call, orders nothing, since CPU work is already in
    order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Inert:
        return self

    def query(self) -> bool:
        return True


_STREAM = _Inert()


class _RedirectCuda(TorchFunctionMode):
    """Turns the literal device "cuda" into the CPU, and CPU tensor type names into those Megatron compares
    with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and "cuda" in str(device):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args)


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """The context in which Megatron's construction, optimizer and schedules run on a CPU. Costs
    about 2 microseconds on each torch call: one in forty of a training step of the tiny model."""
    with _RedirectCuda():
        yield


def install() -> None:
    """Redirects the names listed above. Idempotent. Must run before anything of Megatron is built."""
    if getattr(torch.cuda.current_device, "_megagspo", False):
        return
    _redirect_torch_cuda()
    _import_megatron_uncompiled()
    _redirect_megatron()


def _import_megatron_uncompiled() -> None:
    """Imports Megatron-Core with its `jit_fuser` as the identity. On a GPU it is `torch.compile`; on a CPU
    that would start a C++ compiler inside the first step and cost seconds at import."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **_: model
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compile_


def _redirect_torch_cuda() -> None:
    def current_device() -> torch.device:
        return CPU

    def unchanged(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    setattr(current_device, "_megagspo", True)  # noqa: B010 - functions declare no fields
    no_ops = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_call")
    _replace(torch.cuda, **{name: _nothing() for name in no_ops})
    _replace(
        torch.cuda,
        current_device=current_device,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        Stream=_Inert,
        Event=_Inert,
        current_stream=lambda *args, **kwargs: _STREAM,
        default_stream=lambda *args, **kwargs: _STREAM,
        stream=lambda stream: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        FloatTensor=torch.FloatTensor,
        HalfTensor=torch.HalfTensor,
        BFloat16Tensor=torch.BFloat16Tensor,
    )
    _replace(torch.Tensor, cuda=unchanged, record_stream=_nothing())
    _replace(torch.nn.Module, cuda=unchanged)


def _replace(owner: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


def _nothing() -> Any:
    """A function that does nothing; a new one each time, since torch keeps a table of its functions by
    identity."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _redirect_megatron() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    filesystem_async._results_queue = queue.Queue()
    _allow_uneven_sizes(mappings)


def _allow_uneven_sizes(mappings: Any) -> None:
    """Sends calls with split sizes to the padded collectives below, all others to Megatron's own
    functions."""
    gather_even, reduce_scatter_even = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def gather(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather_even(input_, group, None, use_global_buffer)
        return _gather_uneven(input_, group, [int(size) for size in output_split_sizes])

    def reduce_scatter(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter_even(input_, group, None, use_global_buffer)
        return _reduce_scatter_uneven(input_, group, [int(size) for size in input_split_sizes])

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _gather_uneven(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """All-gather of [sizes[rank], ...] along the first axis to [sum(sizes), ...], each part padded to the
    largest."""
    largest = max(sizes)
    padded = input_.new_zeros((largest, *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum over ranks of [sum(sizes), ...], of which this rank keeps its own [sizes[rank], ...]."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=group)
    return torch.split(total, sizes)[group.rank()].contiguous()
