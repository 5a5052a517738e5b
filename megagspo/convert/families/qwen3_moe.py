"""Qwen3-MoE: Qwen3's attention, and one tensor an expert on disk."""

from megagspo.convert.families.qwen3 import ATTENTION
from megagspo.convert.rules import GatedMLP, Rule, Same

_HF = "model.layers.{layer}.mlp"
_MEGATRON = "decoder.layers.{layer}.mlp"

RULES: list[Rule] = [
    *ATTENTION,
    Same(f"{_HF}.gate.weight", f"{_MEGATRON}.router.weight"),
    GatedMLP(
        f"{_HF}.experts.{{expert}}.gate_proj.weight",
        f"{_HF}.experts.{{expert}}.up_proj.weight",
        f"{_MEGATRON}.experts.{{expert}}.linear_fc1.weight",
    ),
    Same(f"{_HF}.experts.{{expert}}.down_proj.weight", f"{_MEGATRON}.experts.{{expert}}.linear_fc2.weight"),
]
