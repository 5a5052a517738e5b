"""The optimizer's state in the shape of the model's parameters, independent of how either was sharded.

Megatron nests the state of a run with expert parallelism differently from one without (one optimizer for
dense parameters and one for experts, or one for both), which its own `sharded_state_dict` lets leak into the
checkpoint. Here a checkpoint holds, for each parameter X, `optimizer.state.{param, exp_avg, exp_avg_sq}.X`
and nothing else; learning rate and Adam's step number follow from the number of updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron chained into one: dense parameters, experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def sharded_state(
    optimizer: Any, model_state: Mapping[str, Any], metadata: dict[str, str], *, loading: bool
) -> Any:
    """What Megatron's checkpointing saves or fills, in the order of `parts`."""
    state = {}
    for number, part in enumerate(parts(optimizer)):
        _begin(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            state[number] = part.sharded_param_state_fully_reshardable(model_state, loading, metadata)
        else:
            state[number] = _replicated_state(part, model_state)
    return state


def load_state(optimizer: Any, state: Mapping[int, Any], *, updates: int) -> None:
    """Sets moments, master weights and step numbers from what `sharded_state(loading=True)` was filled
    with."""
    for number, part in enumerate(parts(optimizer)):
        if isinstance(part, DistributedOptimizer):
            for entry in part.optimizer.state.values():
                entry.pop("step", None)  # torch's Adam keeps it by parameter; it is set below
            part.load_parameter_state_from_fully_reshardable(state[number])
        # A replicated part was filled in place: its sharded tensors are the optimizer's own.
        for group in part.optimizer.param_groups:
            if "step" in group:  # fused optimizers keep it by group
                group["step"] = updates
        if isinstance(part.optimizer, torch.optim.Adam):
            for entry in part.optimizer.state.values():
                entry["step"] = torch.tensor(float(updates))


def _begin(adam: torch.optim.Optimizer) -> None:
    """Gives Adam the state that it makes itself in its first update: there is something to save, and to be
    filled."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}
                if isinstance(adam, torch.optim.Adam):  # fused optimizers keep it by group
                    adam.state[parameter]["step"] = torch.tensor(0.0)


def _replicated_state(part: Any, model_state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """State of an optimizer that every data-parallel rank holds whole."""
    by_parameter = {
        id(sharded.data): sharded for sharded in nested_values(model_state) if sharded.data is not None
    }
    state = {}
    for number, (parameter, master) in enumerate(_masters(part)):
        like = by_parameter[id(parameter)]
        moments = part.optimizer.state[master]
        tensors = {"param": master, **{name: moments[name] for name in MOMENTS}}
        state[number] = {name: _like(like, name, tensor) for name, tensor in tensors.items()}
    return state


def _like(sharded: Any, name: str, tensor: Tensor) -> Any:
    """The parameter's own sharding, for another tensor of its shape."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{sharded.key}", "data": tensor.detach()}
    if hasattr(sharded, "dtype"):  # a factory, which splits gate from up, has none
        changes["dtype"] = tensor.dtype
    return dataclasses.replace(sharded, **changes)


def _masters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(model parameter, float32 parameter that Adam steps) of an optimizer that is not distributed."""
    if hasattr(part, "fp32_from_float16_groups"):
        for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, masters, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from ((parameter, parameter) for parameter in group)
    else:
        for group in part.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
