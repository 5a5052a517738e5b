"""A checksum over named tensors: what two holders of the same weights compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


class Checksum:
    """BLAKE2b over name, dtype, shape and raw bytes of each tensor, whatever the order they come in.

    Each tensor is hashed when it is added and may be freed then; the digests are combined in the order of the
    names. Bytes are those of the contiguous tensor on the host: a view and its copy agree, +0 and -0 do not.
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}
        self.bytes = 0

    @property
    def tensors(self) -> int:
        return len(self._digests)

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor. A name may be added once."""
        assert name not in self._digests, f"{name} was added to the checksum twice"
        digest = hashlib.blake2b(f"{tensor.dtype}\0{tuple(tensor.shape)}\0".encode(), digest_size=16)
        # Through uint8, as numpy has no bfloat16; flat first, as a 0-dimensional tensor cannot be viewed so.
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
        self._digests[name] = digest.digest()
        self.bytes += raw.numel()

    def hexdigest(self) -> str:
        """Hexadecimal digits over all tensors added."""
        whole = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            whole.update(f"{name}\0".encode() + self._digests[name])
        return whole.hexdigest()


def tensors_checksum(named: Iterable[tuple[str, Tensor]]) -> str:
    """The checksum of all tensors of a stream."""
    checksum = Checksum()
    for name, tensor in named:
        checksum.add(name, tensor)
    return checksum.hexdigest()
