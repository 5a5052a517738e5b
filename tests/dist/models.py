"""Small models made with transformers, and sequences for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megagspo.types import TrainSequence

VOCABULARY = 300
"""Padded to 384 rows on one rank, 512 on two: padding is there, and differs between layouts."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads x head_dim is not the hidden size
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform predictions and routing
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}


def make_moe(directory: Path, **changes: Any) -> Path:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**{**_SHAPE, **experts, "tie_word_embeddings": False, **changes})
    return _write(Qwen3MoeForCausalLM, config, directory)


def make_dense(directory: Path, **changes: Any) -> Path:
    return _write(Qwen3ForCausalLM, Qwen3Config(**{**_SHAPE, **changes}), directory)


def _write(model_class: type[PreTrainedModel], config: Any, directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):  # all ones would hide a norm in the wrong place
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def make_sequences(count: int, *, shortest: int = 3, longest: int = 40, seed: int = 0) -> list[TrainSequence]:
    """Sequences of uneven lengths with prompts of uneven lengths; token 0, the filling of packed rows,
    occurs as well."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    sequences = []
    for position in range(count):
        length = number(shortest, longest + 1)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        sequences.append(
            TrainSequence(id=f"s{position}", token_ids=tuple(tokens), prompt_length=number(1, length))
        )
    return sequences


def as_on_disk(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds a layer's experts in two tensors, a checkpoint each expert's matrices by
    themselves."""
    named: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(both.chunk(2) for both in gradient):
                prefix = name.removesuffix("gate_up_proj") + str(expert)
                named |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            named |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(gradient)}
        else:
            named[name] = gradient
    return named
