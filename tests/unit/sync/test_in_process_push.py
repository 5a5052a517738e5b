"""A push ends proven, or with an engine that refuses to work. The engine is real; faults are planted in the
stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megagspo.convert.safetensors_io import HfCheckpoint
from megagspo.errors import EngineError, PushError
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.sync.in_process import push
from megagspo.sync.probe import Probe
from megagspo.types import Request, SamplingParams

REQUEST = Request(id="r", token_ids=(5, 6), sampling=SamplingParams(max_new_tokens=2), seed=1)


@pytest.fixture
def engine(tiny_moe_dir: Path) -> EmbeddedEngine:
    return EmbeddedEngine(tiny_moe_dir, dtype=torch.float32)


@pytest.fixture
def probe() -> Probe:
    return Probe(vocab_size=512, seed=0, max_length=64)


def stream(directory: Path) -> Iterator[tuple[str, Tensor]]:
    yield from HfCheckpoint(directory).items()


def trainer(directory: Path):  # type: ignore[no-untyped-def]
    """Stands for the trainer: an engine that loaded the same weights from disk."""
    reference = EmbeddedEngine.from_pretrained(directory, dtype=torch.float32)
    return lambda sequences: [torch.tensor(values) for values in reference.score(sequences)]


def test_a_whole_push_is_proven_and_served(engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path) -> None:
    report = push(
        engine, stream(tiny_moe_dir), version=7, probe=probe, trainer_logprobs=trainer(tiny_moe_dir)
    )
    source = HfCheckpoint(tiny_moe_dir)
    assert engine.version == report.version == 7
    assert report.receipt.tensors == len(source)
    assert report.receipt.bytes == sum(tensor.nbytes for tensor in source.values())
    assert report.probe_abs_mean < 1e-5  # two runs of the same code on the same weights
    assert len(engine.generate([REQUEST])[0].token_ids) > 0


def test_the_probe_reaches_every_expert_of_every_layer(
    engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path
) -> None:
    push(engine, stream(tiny_moe_dir), version=1, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    hit = engine.experts_hit(probe.sequences(engine))
    assert probe.missed == 0
    assert hit.shape == (4, 8)
    assert hit.all()


def test_the_probe_stays_the_same_for_the_whole_run(
    engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path
) -> None:
    push(engine, stream(tiny_moe_dir), version=1, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    first = probe.sequences(engine)
    push(engine, stream(tiny_moe_dir), version=2, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    assert probe.sequences(engine) == first


@pytest.mark.parametrize("fault", ["missing", "twice", "unknown", "shape"])
def test_a_stream_that_is_not_whole_leaves_the_engine_unusable(
    engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path, fault: str
) -> None:
    push(engine, stream(tiny_moe_dir), version=1, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))

    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream(tiny_moe_dir):
            if name != "model.norm.weight":
                yield name, tensor
            elif fault == "twice":
                yield name, tensor
                yield name, tensor
            elif fault == "unknown":
                yield name + "x", tensor
            elif fault == "shape":
                yield name, tensor[:-1]

    with pytest.raises((PushError, EngineError, AssertionError), match=r"model\.norm\.weight"):
        push(engine, broken(), version=2, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    assert engine.version is None
    with pytest.raises(EngineError):
        engine.generate([REQUEST])

    push(engine, stream(tiny_moe_dir), version=3, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    assert engine.version == 3


def test_two_tensors_exchanged_pass_the_checksum_but_not_the_probe(
    engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path
) -> None:
    gate, up = (f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up"))
    swap = {gate: up, up: gate}

    def exchanged() -> Iterator[tuple[str, Tensor]]:
        yield from ((swap.get(name, name), tensor) for name, tensor in stream(tiny_moe_dir))

    with pytest.raises(PushError, match="probe"):
        push(engine, exchanged(), version=2, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    assert engine.version is None


def test_nan_weights_never_pass_the_probe(engine: EmbeddedEngine, probe: Probe, tiny_moe_dir: Path) -> None:
    def spoiled() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream(tiny_moe_dir):
            yield name, torch.full_like(tensor, torch.nan) if name == "model.norm.weight" else tensor

    with pytest.raises(PushError, match="nan"):
        push(engine, spoiled(), version=2, probe=probe, trainer_logprobs=trainer(tiny_moe_dir))
    assert engine.version is None
