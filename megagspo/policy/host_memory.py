"""Weights, gradients and optimizer state to host memory and back, to lend the device to a rollout engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megagspo.policy.optimizer_state import parts


class HostMemory:
    """Where a policy's state waits while the device is lent. What comes back is what left, bit for bit.

    Memory is given back by emptying the tensors' storages in place, so that parameters, which are views of
    Megatron's buffers, are the same views of the same buffers afterwards.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Moves the tensors' storages, each once however many views it has; returns their bytes."""
        assert not self._waiting, "the state is in host memory already"
        for storage in _storages(tensors):
            size = storage.nbytes()
            pinned = storage.device.type != "cpu"  # a copy from pinned memory does not wait
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._waiting.append((storage, host))
        return sum(host.numel() for _, host in self._waiting)

    def give_back(self) -> None:
        """Moves everything back to where it was."""
        for storage, host in self._waiting:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._waiting = []


def state_tensors(chunks: Sequence[Any], optimizer: Any) -> Iterator[Tensor]:
    """Every tensor of a training state: weights, buffers, gradient buffers, master weights, moments."""
    for chunk in chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield from (part for part in (buffer.param_data, buffer.grad_data) if part is not None)
        yield from chunk.module.buffers()
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for entry in part.optimizer.state.values():
            yield from (value for value in entry.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
