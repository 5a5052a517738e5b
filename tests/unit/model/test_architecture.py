"""What is read from config.json, and which layouts a model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megagspo.config.layout import ParallelConfig
from megagspo.errors import ConfigError, MissingError, ModelError
from megagspo.model import build
from megagspo.model.architecture import active_weights, check_divides, quadratic_work, read_architecture
from megagspo.model.build import padded_vocabulary

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "num_hidden_layers": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def architecture(directory: Path, hf: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_architecture(directory)


def test_sizes_are_those_of_the_configuration(tmp_path: Path) -> None:
    read = architecture(tmp_path, MOE)
    assert (read.vocab_size, read.max_positions, read.tied_embeddings) == (300, 256, False)
    assert read.transformer["kv_channels"] == 16  # not 32 / 4
    assert read.transformer["num_moe_experts"] == 8
    assert read.transformer["moe_router_topk"] == 2


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_comes_before_the_choice_only_without_renormalising(
    tmp_path: Path, renormalise: bool
) -> None:
    read = architecture(tmp_path, {**MOE, "norm_topk_prob": renormalise})
    assert read.transformer["moe_router_pre_softmax"] is not renormalise


@pytest.mark.parametrize("nested", [True, False])
def test_rotary_base_is_read_from_either_place(tmp_path: Path, nested: bool) -> None:
    hf = dict(DENSE)
    if nested:
        hf["rope_parameters"] = {"rope_theta": hf.pop("rope_theta"), "rope_type": "default"}
    assert architecture(tmp_path, hf).rotary_base == 5000.0


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_is_refused_not_ignored(tmp_path: Path, place: str) -> None:
    with pytest.raises(ModelError, match="yarn"):
        architecture(tmp_path, {**DENSE, place: {"rope_type": "yarn", "factor": 4.0}})


@pytest.mark.parametrize("change", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}], ids=str)
def test_mixed_dense_layers_are_refused_not_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="decoder_sparse_step"):
        architecture(tmp_path, {**MOE, **change})


def test_messages_name_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json"):
        read_architecture(tmp_path)
    with pytest.raises(ModelError, match=r"'gpt2' is not supported; supported: qwen3, qwen3_moe"):
        architecture(tmp_path, {"model_type": "gpt2"})
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        architecture(tmp_path, {key: value for key, value in DENSE.items() if key != "hidden_size"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "hf", "message"),
    [
        ({"pipeline": 4}, DENSE, "parallel.pipeline=4 does not divide the model's 30 layers"),
        (
            {"pipeline": 5, "virtual_pipeline": 4},
            DENSE,
            "parallel.virtual_pipeline=4 does not divide the model's 6 layers a pipeline stage",
        ),
        ({"tensor": 4}, DENSE, "parallel.tensor=4 does not divide the model's 2 key/value heads"),
        ({"expert": 3}, MOE, "parallel.expert=3 does not divide the model's 8 experts"),
        ({"expert": 2}, DENSE, "parallel.expert=2, but the model has no experts"),
        (
            {"expert_tensor": 5},
            MOE,
            "parallel.expert_tensor=5 does not divide the model's 24 expert hidden units",
        ),
    ],
)
def test_uneven_cuts_are_refused(
    tmp_path: Path, sizes: dict[str, int], hf: dict[str, Any], message: str
) -> None:
    """Layers above all (B14): 30 layers on 4 stages must not lose two."""
    layout = ParallelConfig.model_validate({"data": "auto", **sizes}).resolve()
    with pytest.raises(ConfigError, match=message):
        check_divides(architecture(tmp_path, hf), layout)


QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


def test_active_weights_are_the_published_ones(tmp_path: Path) -> None:
    """3.3 billion activated (model card of Qwen3-30B-A3B), which counts the embedding."""
    read = architecture(tmp_path, QWEN3_30B_A3B)
    assert active_weights(read) + 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)


def test_attention_of_two_tokens_is_counted_product_by_product(tmp_path: Path) -> None:
    """Of long sequences each further pair of tokens costs a score and a weighted value in every layer."""
    read = architecture(tmp_path, DENSE)
    weights = 30 * (32 * 16 * (4 + 4 + 2 + 2) + 3 * 32 * 48) + 32 * 300
    assert active_weights(read) == weights
    pair = 30 * 4 * (2 * 16 + 2 * 16)  # layers, heads, multiply-adds of two products of 16 channels
    assert quadratic_work(read) == pytest.approx(pair / 2 / (2 * weights))


@pytest.mark.parametrize(("vocabulary", "divisor", "tensor", "rows"), [(10, 4, 2, 8), (151936, 64, 2, 75968)])
def test_vocabulary_is_padded_once(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, divisor: int, tensor: int, rows: int
) -> None:
    """B7: the padded vocabulary is that of the whole model, of which a rank has 1 / tensor."""
    monkeypatch.setattr(build, "VOCABULARY_DIVISOR", divisor)
    assert padded_vocabulary(vocabulary, tensor) == rows * tensor


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 151936])
def test_padding_is_the_smallest_that_divides(vocabulary: int, tensor: int) -> None:
    padded = padded_vocabulary(vocabulary, tensor)
    assert padded % (128 * tensor) == 0
    assert vocabulary <= padded < vocabulary + 128 * tensor
