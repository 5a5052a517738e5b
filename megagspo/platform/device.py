"""Which device this process computes on, and what follows from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megagspo.errors import ConfigError
from megagspo.platform.quiet import silence_known_warnings


@dataclass(frozen=True, kw_only=True)
class Platform:
    """CUDA with NCCL, or a CPU with gloo. The same Megatron-Core code runs on both."""

    device: torch.device
    backend: Literal["nccl", "gloo"]

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def default_dtype(self) -> torch.dtype:
        """bfloat16 on a GPU; float32 on a CPU, where bfloat16 matrix products are many times slower."""
        return torch.float32 if self.is_cpu else torch.bfloat16

    @contextlib.contextmanager
    def megatron_calls(self) -> Iterator[None]:
        """The context for Megatron's constructors, optimizers and schedules; see `platform/cpu.py`."""
        if not self.is_cpu:
            yield
            return
        from megagspo.platform import cpu

        with cpu.megatron_calls():
            yield


def pick_platform(
    device: Literal["auto", "cpu", "cuda"], *, local_rank: int = 0, threads: int = 1
) -> Platform:
    """The platform for this process. On a CPU it redirects what Megatron-Core expects of CUDA
    (`cpu.install`).

    threads: OpenMP threads of this rank; more than one busy thread on a shared core slows a step many times.
    Raises ConfigError for `cuda` on a machine that has none.
    """
    silence_known_warnings()
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "platform.device=cuda, but torch finds no CUDA device on this machine: "
            "use platform.device=auto or cpu, or install a CUDA build of torch"
        )
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return Platform(device=torch.device("cuda", local_rank), backend="nccl")
    torch.set_num_threads(threads)
    from megagspo.platform import cpu

    cpu.install()
    return Platform(device=torch.device("cpu"), backend="gloo")
