"""Where each tensor of a Hugging Face checkpoint lives in the model, and how a push gets there.

A checkpoint on disk has one tensor an expert and projection; transformers 5 holds all experts of a layer
packed. Both are the same memory here: every checkpoint name has a view of the parameter that holds it, so
loading is a copy into a view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megagspo.errors import PushError
from megagspo.platform.checksum import tensors_checksum
from megagspo.types import PushReceipt

# Packed parameter [E, rows, columns] -> the projections whose rows it stacks; on disk each of them is a
# tensor `<experts>.<e>.<projection>.weight`. True of qwen3_moe and of all families that share its experts; a
# family that packs otherwise is added here.
_PACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PACKED_NAME = re.compile(rf"(?P<experts>.*\.mlp\.experts)\.(?P<packed>{'|'.join(_PACKED_EXPERTS)})")


def _unpacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's names for one tensor of the model, each with its view."""
    match = _PACKED_NAME.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    projections = _PACKED_EXPERTS[match["packed"]]
    for e, expert in enumerate(tensor):
        for projection, view in zip(projections, expert.chunk(len(projections)), strict=True):
            yield f"{match['experts']}.{e}.{projection}.weight", view


class CheckpointViews:
    """The model's weights by checkpoint name; `tied` are second names of some, which a stream may omit."""

    def __init__(self, module: nn.Module) -> None:
        self.views: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        first_name: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in module.state_dict().items():
            first = first_name.setdefault((tensor.data_ptr(), tensor.shape), name)
            if first != name:
                self.tied[name] = first
            else:
                self.views.update(_unpacked(name, tensor))

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> PushReceipt:
        """Copies a stream that has every weight once, in any order; its checksum is of what is then held.

        Raises PushError listing what was unknown, sent twice, misshapen, missing or at odds with the weight
        it is tied to. The stream is read to its end first, so that a peer which sends it is not left hanging
        and all mistakes are listed at once.
        """
        received: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}  # tied names in the stream
        wrong: dict[str, list[str]] = {}
        nbytes = 0
        for name, tensor in tensors:
            view = self.views.get(self.tied.get(name, name))
            if view is None:
                wrong.setdefault("unknown", []).append(name)
            elif name in received:
                wrong.setdefault("sent twice", []).append(name)
            elif view.shape != tensor.shape:
                sizes = f"{name} (sent {list(tensor.shape)}, held {list(view.shape)})"
                wrong.setdefault("of the wrong shape", []).append(sizes)
                received[name] = view
            else:
                if name in self.tied:
                    second[name] = tensor.to(device=view.device, dtype=view.dtype, copy=True)
                else:
                    view.copy_(tensor)
                received[name] = view
                nbytes += tensor.nbytes
        wrong["missing"] = [name for name in self.views if name not in received]
        wrong["not equal to the weight that they are tied to"] = [
            name for name, tensor in second.items() if not torch.equal(tensor, received[name])
        ]
        if complaint := "; ".join(f"{_listed(names)} {kind}" for kind, names in wrong.items() if names):
            raise PushError(f"the pushed weights do not fit the model, which stays unusable: {complaint}")
        return PushReceipt(tensors=len(received), bytes=nbytes, checksum=tensors_checksum(received.items()))


def _listed(names: list[str], limit: int = 20) -> str:
    """The first names and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
