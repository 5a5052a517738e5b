"""Checkpoint names and the memory they stand for; the checksum; models built without weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megagspo.errors import MissingError, ModelError, PushError
from megagspo.platform.checksum import tensors_checksum
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.rollout.embedded.model import LanguageModel, empty_model, pretrained_model
from megagspo.rollout.embedded.weights import CheckpointViews
from tests.contract.engines import checkpoint_tensors

FLOAT = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 whose head is its embedding."""
    directory = tmp_path_factory.mktemp("models") / "tied"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def assert_same_model(ours: LanguageModel, theirs: LanguageModel) -> None:
    state = theirs.module.state_dict()
    assert ours.module.state_dict().keys() == state.keys()
    for name, tensor in ours.module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    buffers = dict(theirs.module.named_buffers())
    for name, buffer in ours.module.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_push_gives_bit_for_bit_what_from_pretrained_reads(tiny_moe_dir: Path, dtype: torch.dtype) -> None:
    model = empty_model(tiny_moe_dir, dtype=dtype, device="cpu")
    tensors = checkpoint_tensors(tiny_moe_dir)
    views = CheckpointViews(model.module)
    assert views.views.keys() == tensors.keys()
    receipt = views.load(tensors.items())
    assert_same_model(model, pretrained_model(tiny_moe_dir, dtype=dtype, device="cpu"))
    assert receipt.checksum == tensors_checksum((name, t.to(dtype)) for name, t in tensors.items())


def test_a_tied_head_may_be_left_out_or_sent_equal_but_not_different(tied_dir: Path) -> None:
    tensors = checkpoint_tensors(tied_dir)
    assert "lm_head.weight" not in tensors
    model = empty_model(tied_dir, **FLOAT)  # type: ignore[arg-type]
    views = CheckpointViews(model.module)
    views.load(tensors.items())
    assert_same_model(model, pretrained_model(tied_dir, **FLOAT))  # type: ignore[arg-type]
    embedding = tensors["model.embed_tokens.weight"]
    head = ("lm_head.weight", embedding)
    for order in ([head, *tensors.items()], [*tensors.items(), head]):
        receipt = views.load(order)
        assert receipt.tensors == len(tensors) + 1
        assert receipt.checksum == tensors_checksum(order)
    with pytest.raises(PushError, match=r"lm_head\.weight not equal"):
        views.load([("lm_head.weight", embedding + 1), *tensors.items()])


def test_every_mistake_of_a_push_is_listed(tiny_moe_dir: Path) -> None:
    views = CheckpointViews(empty_model(tiny_moe_dir, **FLOAT).module)  # type: ignore[arg-type]
    tensors = checkpoint_tensors(tiny_moe_dir)
    gone = tensors.pop("model.layers.1.mlp.gate.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5]
    with pytest.raises(PushError) as caught:
        views.load([*tensors.items(), ("lm_head.bias", gone), ("lm_head.weight", tensors["lm_head.weight"])])
    for complaint in (
        "lm_head.bias unknown",
        "lm_head.weight sent twice",
        "model.norm.weight (sent [5], held [128]) of the wrong shape",
        "model.layers.1.mlp.gate.weight missing",
    ):
        assert complaint in str(caught.value)
    with pytest.raises(PushError, match=r"and \d+ more missing"):
        views.load([])


def test_pushed_weights_are_ordinary_tensors(tiny_moe_dir: Path) -> None:
    engine = EmbeddedEngine(tiny_moe_dir, dtype=torch.float32)
    with torch.inference_mode():  # wherever the caller is
        engine.begin_push()
        engine.load_weights(checkpoint_tensors(tiny_moe_dir).items())
    assert not any(p.is_inference() or p.requires_grad for p in engine._model.module.parameters())
    engine.begin_push()
    engine.load_weights(checkpoint_tensors(tiny_moe_dir).items())


def test_checksum_sees_names_bytes_shapes_and_dtypes_but_not_order_or_strides() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor(2.5, dtype=torch.bfloat16)
    base = tensors_checksum([("a", a), ("b", b)])
    assert base == tensors_checksum(iter([("b", b.clone()), ("a", a.T.contiguous().T)]))

    def variants() -> list[list[tuple[str, Tensor]]]:
        changed = a.clone()
        changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
        return [
            [("a", changed), ("b", b)],
            [("a", a.reshape(3, 2)), ("b", b)],
            [("a", a.view(torch.int32)), ("b", b)],
            [("b", a), ("a", b)],
            [("a", a)],
        ]

    sums = [tensors_checksum(v) for v in variants()]
    assert len({base, *sums}) == len(sums) + 1


def test_what_is_not_a_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json"):
        EmbeddedEngine(tmp_path, dtype=torch.float32)


def test_a_directory_that_lacks_weights_is_not_served(tiny_moe_dir: Path, tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_moe_dir)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    shutil.copy(tiny_moe_dir / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 of the model's weights, model\.layers\.1\.self_attn\.q_proj"
    ):
        EmbeddedEngine.from_pretrained(tmp_path, dtype=torch.float32)


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    config: Any = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="full attention only"):
        EmbeddedEngine(tmp_path, dtype=torch.float32)
