"""The fixed token sequences that a push is proven with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megagspo.types import Engine

_LENGTH = 64
_MOST_SEQUENCES = 64


class Probe:
    """Random token ids, fixed for the run, and just so many that every expert of every layer is reached.

    Grown once, through the engine, at the first push. Experts that no token reaches stay out of it when even
    `_MOST_SEQUENCES` sequences do not find them; `missed` says how many those are.
    """

    def __init__(self, *, vocab_size: int, seed: int, max_length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (_MOST_SEQUENCES, min(_LENGTH, max_length))
        self._pool: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
        self._count: int | None = None
        self.missed = 0

    def sequences(self, engine: Engine) -> Sequence[Sequence[int]]:
        """The probe. The first call decides its size."""
        if self._count is None:
            self._count = 1
            while (missed := self._unreached(engine)) and self._count < _MOST_SEQUENCES:
                self._count *= 2
            self.missed = missed
        return self._pool[: self._count]

    def _unreached(self, engine: Engine) -> int:
        return int((~engine.experts_hit(self._pool[: self._count])).sum())
