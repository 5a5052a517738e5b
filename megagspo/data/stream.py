"""The endless order in which prompts are trained on, resumable to the prompt."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from megagspo.errors import DataError
from megagspo.types import Prompt


class PromptStream:
    """Goes through the prompts epoch after epoch, each a fresh permutation decided by (seed, epoch) alone.

    A batch may span two epochs; no prompt is left out or seen twice within one.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("no prompts to train on: data.train is empty")
        self._prompts = list(prompts)
        self._seed = seed
        self._fingerprint = fingerprint(self._prompts)
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
            upto = min(self._position + count - len(taken), len(self._order))
            taken += [self._prompts[index] for index in self._order[self._position : upto]]
            self._position = upto
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; JSON-able, and a few bytes whatever the size of the data."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where `state` was taken; DataError if it belongs to other data or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the checkpoint's data position belongs to other prompts than this configuration gives. "
                "Restore data.train, data.eval and the tokenizer as they were, or start a new run"
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint's data order was made with seed {state['seed']}, this run has {self._seed}. "
                f"Set run.seed to {state['seed']}, or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        # `random` hashes a string seed by SHA-512: the same order in every process and on every machine.
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of ids and token ids, in order: another seed of a source keeps ids, but not problems."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids]).encode())
    return digest.hexdigest()
