"""The live model's weights in Hugging Face layout, both ways, for every parallel layout.

Each rank holds some shards of some parameters. An index of who holds what is exchanged once; after that
import is local, and export is a sequence of broadcasts from owners, in buckets, so that at no time more than
a bucket is gathered. Neither knows about process groups, so tensor, expert, expert-tensor and pipeline
parallelism in any combination take the same path.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megagspo.config.schema import Layout
from megagspo.convert.names import canonical_name, is_expert
from megagspo.convert.rules import Bound, Dimensions, coverage
from megagspo.convert.sharding import cut_of, pad_rows
from megagspo.errors import ModelError
from megagspo.types import HfTensors

_WRAPPERS = re.compile(r"^(module\.)+")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Where one part of a parameter lives: the lowest global rank that holds it, and the part's shape and
    dtype."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype


class ModelWeights:
    """Import into and export from a live Megatron model. Every method that communicates is called by all
    ranks alike."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: Layout,
        bound: Sequence[Bound],
        dimensions: Dimensions,
    ) -> None:
        self.bound = bound
        self.dimensions = dimensions
        self._layout = layout
        self._local = {
            name: parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in self._parameters(chunk, number).items()
        }
        self._shards = self._exchange_index()
        self._check_coverage()

    def _parameters(self, chunk: torch.nn.Module, number: int) -> dict[str, torch.nn.Parameter]:
        """canonical name -> parameter of the number-th chunk of this rank."""
        first_layer = get_transformer_layer_offset(chunk.config, vp_stage=number)
        first_expert = parallel_state.get_expert_model_parallel_rank() * (
            self.dimensions.experts // self._layout.expert
        )
        return {
            canonical_name(
                _WRAPPERS.sub("", name), first_layer=first_layer, first_expert=first_expert
            ): parameter
            for name, parameter in chunk.named_parameters()
        }

    def _exchange_index(self) -> dict[str, list[Shard]]:
        """canonical name -> its shards in the order of parts."""
        mine = {
            name: (self._part(name)[0], tuple(parameter.shape), parameter.dtype)
            for name, parameter in self._local.items()
        }
        everyone: list[dict[str, tuple[int, tuple[int, ...], torch.dtype]]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        shards: dict[str, dict[int, Shard]] = defaultdict(dict)
        for rank, held in enumerate(everyone):
            for name, (part, shape, dtype) in held.items():
                shards[name].setdefault(part, Shard(owner=rank, shape=torch.Size(shape), dtype=dtype))
        return {name: [parts[part] for part in sorted(parts)] for name, parts in shards.items()}

    def _part(self, name: str) -> tuple[int, int]:
        """Which part of how many this rank holds of a parameter."""
        if cut_of(name) is None:
            return 0, 1
        if is_expert(name):
            return parallel_state.get_expert_tensor_parallel_rank(), self._layout.expert_tensor
        return parallel_state.get_tensor_model_parallel_rank(), self._layout.tensor

    def _check_coverage(self) -> None:
        """Every parameter of the model has a rule and every rule a parameter."""
        ruled = {item.megatron for item in self.bound} | self._tied_output()
        missing, surplus = sorted(ruled - set(self._shards)), sorted(set(self._shards) - ruled)
        if missing or surplus:
            raise ModelError(f"rules and model disagree: no parameter for {missing}; no rule for {surplus}")

    def _tied_output(self) -> set[str]:
        """A tied model's last pipeline stage holds a copy of the embedding as its output layer."""
        tied = self.dimensions.tied_embeddings and "output_layer.weight" in self._shards
        return {"output_layer.weight"} if tied else set()

    # --- import ---------------------------------------------------------------------------------------------

    def load(self, source: Mapping[str, Tensor]) -> None:
        """Sets every local parameter from whole Hugging Face tensors. Each source tensor must belong to a
        rule, and each rule must find its tensors; otherwise ModelError lists all of them and nothing is
        set."""
        missing, surplus = coverage(self.bound, set(source))
        if self.dimensions.tied_embeddings and "lm_head.weight" in surplus:
            surplus.remove("lm_head.weight")  # some checkpoints store the tied copy as well
        if missing or surplus:
            raise ModelError(_uncovered(missing, surplus))
        for item in self.bound:
            targets = [name for name in (item.megatron, *self._copies(item.megatron)) if name in self._local]
            if targets:
                whole = item.rule.to_megatron([source[name] for name in item.hf], self.dimensions)
                for name in targets:
                    self._set(name, whole, item)

    def _copies(self, name: str) -> set[str]:
        return self._tied_output() if name == "embedding.word_embeddings.weight" else set()

    def _set(self, name: str, whole: Tensor, item: Bound) -> None:
        cut = cut_of(name)
        part, parts = self._part(name)
        parameter = self._local[name]
        if cut is not None:
            if cut.vocabulary and whole.shape[0] != self.dimensions.vocabulary:
                raise ModelError(
                    f"{', '.join(item.hf)} has {whole.shape[0]} rows, config.json says vocab_size="
                    f"{self.dimensions.vocabulary}: config.json and the weights do not belong together"
                )
            if cut.vocabulary:
                whole = pad_rows(whole, parameter.shape[0] * parts)
            whole = cut.split(whole, parts)[part]
        if whole.shape != parameter.shape:
            raise ModelError(
                f"{', '.join(item.hf)}: part {part} of {parts} has shape {tuple(whole.shape)}, the model's "
                f"{name} {tuple(parameter.shape)}: config.json and the weights do not belong together"
            )
        with torch.no_grad():
            parameter.copy_(whole)

    # --- export ---------------------------------------------------------------------------------------------

    def stream(self, bucket_bytes: int) -> HfTensors:
        """Named tensors in Hugging Face layout, on every rank, in the order of the rules. Tensors may share a
        bucket's storage: a consumer that keeps one copies it. All ranks must consume the stream to its
        end."""
        for bucket in self._buckets(bucket_bytes):
            gathered = self._gather([item.megatron for item in bucket])
            for item in bucket:
                whole = self._whole(item.megatron, gathered)
                yield from zip(item.hf, item.rule.to_hf(whole, self.dimensions), strict=True)

    def _buckets(self, bucket_bytes: int) -> Iterator[list[Bound]]:
        bucket: list[Bound] = []
        size = 0
        for item in self.bound:
            shards = self._shards[item.megatron]
            bytes_ = sum(shard.shape.numel() * shard.dtype.itemsize for shard in shards)
            if bucket and size + bytes_ > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += bytes_
        if bucket:
            yield bucket

    def _gather(self, names: Sequence[str]) -> dict[tuple[str, int], Tensor]:
        """All parts of the named parameters, on every rank: one broadcast for each owner and dtype."""
        parts_of: dict[tuple[int, torch.dtype], list[tuple[str, int]]] = defaultdict(list)
        for name in names:
            for part, shard in enumerate(self._shards[name]):
                parts_of[shard.owner, shard.dtype].append((name, part))
        gathered = {}
        for (owner, dtype), keys in sorted(
            parts_of.items(), key=lambda entry: (entry[0][0], str(entry[0][1]))
        ):
            shapes = [self._shards[name][part].shape for name, part in keys]
            flat = self._broadcast(owner, dtype, [name for name, _ in keys], shapes)
            pieces = flat.split([shape.numel() for shape in shapes])
            gathered.update(
                {key: piece.view(shape) for key, piece, shape in zip(keys, pieces, shapes, strict=True)}
            )
        return gathered

    def _broadcast(
        self, owner: int, dtype: torch.dtype, names: Sequence[str], shapes: Sequence[torch.Size]
    ) -> Tensor:
        device = next(iter(self._local.values())).device
        if dist.get_rank() == owner:
            flat = torch.cat([self._local[name].detach().flatten() for name in names])
        else:
            flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(flat, src=owner)
        return flat

    def _whole(self, name: str, gathered: Mapping[tuple[str, int], Tensor]) -> Tensor:
        cut = cut_of(name)
        parts = [gathered[name, part] for part in range(len(self._shards[name]))]
        if cut is None:
            return parts[0]
        whole = cut.merge(parts)
        return whole[: self.dimensions.vocabulary] if cut.vocabulary else whole


def _uncovered(missing: Sequence[str], surplus: Sequence[str]) -> str:
    lines = [f"  missing: {name}" for name in missing] + [f"  no rule for: {name}" for name in surplus]
    return "the checkpoint's tensors are not those of this model family:\n" + "\n".join(lines)
