"""Pushing weights into an engine of the same process, and proving that they arrived.

A push ends with the engine at the new version and proven: every tensor and byte acknowledged, the checksum of
what the engine holds equal to that of what was sent, and the log-probabilities of a fixed probe through the
engine equal to the trainer's. Checksums miss a wrong layout (two tensors exchanged on both sides); the probe
does not. Until the proof is complete the engine refuses to generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.errors import PushError
from megagspo.platform.checksum import Checksum
from megagspo.sync.probe import Probe
from megagspo.types import Engine, HfTensors, PushReceipt

# Mean |log-probability difference| over the probe. Two float32 implementations differ by about 1e-6, bfloat16
# ones by about 1e-2; a single wrong expert moves the tokens it serves by far more than its share of these.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What was proven. probe_abs_mean, probe_abs_max: |trainer - engine| over the probe's log-probabilities,
    in nats."""

    version: int
    receipt: PushReceipt
    probe_abs_mean: float
    probe_abs_max: float


def push(
    engine: Engine,
    tensors: HfTensors,
    *,
    version: int,
    probe: Probe,
    trainer_logprobs: Callable[[Sequence[Sequence[int]]], list[Tensor]],
) -> PushReport:
    """Sends the weights of `version`, proves that the engine holds them, and only then lets it serve them.

    trainer_logprobs: the trainer's log-probabilities of tokens 1.. of each sequence. Raises PushError, naming
    what differs; the engine then stays unusable until a whole push succeeds.
    """
    engine.begin_push()
    sent = Checksum()
    dtypes: set[torch.dtype] = set()

    def counted() -> HfTensors:
        for name, tensor in tensors:
            sent.add(name, tensor)
            dtypes.add(tensor.dtype)
            yield name, tensor

    receipt = engine.load_weights(counted())
    expected = PushReceipt(tensors=sent.tensors, bytes=sent.bytes, checksum=sent.hexdigest())
    if receipt != expected:
        raise PushError(f"push of version {version}: sent {expected}, the engine holds {receipt}")

    sequences = probe.sequences(engine)
    theirs = torch.cat([torch.tensor(values, dtype=torch.float32) for values in engine.score(sequences)])
    difference = (torch.cat(trainer_logprobs(sequences)) - theirs).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    tolerance = max(_TOLERANCE[dtype] for dtype in dtypes)
    if not mean <= tolerance:  # a NaN fails as well
        raise PushError(
            f"push of version {version}: all bytes arrived, but the engine's log-probabilities of the probe "
            f"differ from the trainer's by {mean:.3g} on average (allowed {tolerance:g}): "
            "trainer and engine disagree on the layout of a tensor"
        )
    engine.commit(version)
    return PushReport(version=version, receipt=receipt, probe_abs_mean=mean, probe_abs_max=largest)
