"""The reference policy: a second set of weights on the host that takes the model's place while it is asked.

Not a second model on the device: a KL term costs host memory of the size of this rank's weights, and one
forward pass a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megagspo.errors import MissingError
from megagspo.policy.megatron_checkpoint import load_weights, save_weights


class Reference:
    """A frozen copy of a model's weights, this rank's chunks. It begins as what the model holds now."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = list(chunks)
        self._weights = _copies(self._chunks)

    def renew(self) -> None:
        """The model's weights of now become the reference."""
        self._weights = _copies(self._chunks)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the reference's weights; its own come back bit-equal afterwards."""
        own = _copies(self._chunks)
        _put(self._chunks, self._weights)
        try:
            yield
        finally:
            _put(self._chunks, own)

    def save(self, directory: Path) -> None:
        """Writes it as a Megatron checkpoint of weights. Called by all ranks."""
        if not torch.distributed.get_rank():
            directory.mkdir()
        torch.distributed.barrier()
        with self.in_place():
            save_weights(directory, self._chunks)

    def load(self, directory: Path) -> None:
        """Takes it from a checkpoint that `save` wrote in any layout; the model's own weights stay."""
        if not directory.is_dir():
            raise MissingError(
                f"{directory} does not exist: the checkpoint was written by a run that did not renew its "
                "reference; set algorithm.kl.reference_every=0 to keep the policy the run began with"
            )
        own = _copies(self._chunks)
        load_weights(directory, self._chunks)
        self.renew()
        _put(self._chunks, own)


def _state(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """Weights, and what is a weight in all but name: the router's expert bias is a buffer."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield parameter.data
        yield from chunk.buffers()


def _copies(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in _state(chunks)]


def _put(chunks: Sequence[torch.nn.Module], values: list[Tensor]) -> None:
    for tensor, value in zip(_state(chunks), values, strict=True):
        tensor.copy_(value)  # in place: a parameter is a view of Megatron's buffer
