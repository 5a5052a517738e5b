"""Names of a live Megatron model's parameters <-> canonical names.

Canonical: the torch layer spec's, layers numbered over the whole model, experts as `experts.{expert}.`
numbered over the whole model. A live model numbers layers from 0 in each pipeline stage and experts from 0 on
each expert-parallel rank, and TransformerEngine's modules hold norms inside the following linear layer and
the experts side by side in one module.
"""

from __future__ import annotations

import re

# TransformerEngine's place of a norm -> the torch spec's. For a dense layer linear_fc1 is mlp.linear_fc1.
_TRANSFORMER_ENGINE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def canonical_name(name: str, *, first_layer: int, first_expert: int) -> str:
    """The canonical name of a live parameter.

    name: as `named_parameters()` gives it, wrappers' `module.` removed; first_layer, first_expert: the
    model-wide numbers of this rank's layer 0 and expert 0.
    """
    layered = _LAYER.match(name)
    if not layered:
        return name
    layer, rest = first_layer + int(layered[1]), layered[2]
    rest = _TRANSFORMER_ENGINE.get(rest, rest)
    if local := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.{first_expert + int(local[1])}.{local[2]}"
    elif grouped := _GROUPED_EXPERT.match(rest):
        rest = f"mlp.experts.{first_expert + int(grouped[3])}.{grouped[1]}.{grouped[2]}"
    return f"decoder.layers.{layer}.{rest}"


def is_expert(canonical: str) -> bool:
    """Whether the parameter belongs to a routed expert (and is cut over expert-tensor-parallel ranks)."""
    return ".mlp.experts." in canonical
