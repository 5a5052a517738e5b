"""How the ranks are divided: the `parallel` section, and the layout it resolves to for a world size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError, ValidationError

from megagspo.config.section import AtLeastOne, Section
from megagspo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every parallel size as a number. world_size = tensor * pipeline * context * data; experts share
    tensor * context * data."""

    tensor: int
    pipeline: int
    virtual_pipeline: int = 1
    context: int = 1
    expert: int
    expert_tensor: int
    data: int
    sequence: bool
    world_size: int


class ParallelConfig(Section):
    """How many ranks share each kind of work. A stage has tensor * context * data ranks, which experts divide
    anew."""

    tensor: AtLeastOne = 1
    """Ranks that share each attention and dense layer (tensor parallel)."""
    pipeline: AtLeastOne = 1
    """Stages that the layers are divided into (pipeline parallel)."""
    virtual_pipeline: AtLeastOne = 1
    """Chunks of layers on each stage, interleaved to shorten the pipeline's idle time; 1: off."""
    context: AtLeastOne = 1
    """Ranks that share the tokens of each sequence (context parallel): for sequences too long for one."""
    expert: AtLeastOne = 1
    """Ranks that the experts of a layer are divided over (expert parallel)."""
    expert_tensor: AtLeastOne = 1
    """Ranks that share each single expert (tensor parallel inside experts)."""
    data: AtLeastOne | Literal["auto"] = 1
    """Copies of the model that see different samples; auto fills the ranks there are."""
    sequence: bool | None = None
    """Divide activations between attention layers over the tensor ranks; null means: when tensor > 1."""

    @field_validator("data", mode="wrap")
    @classmethod
    def _one_message(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> int | Literal["auto"]:
        """A union reports one error per member; a user wants one."""
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(
                "data_size", "Input should be a whole number from 1 on, or auto"
            ) from None

    def resolve(self, world_size: int | None = None) -> Layout:
        """The layout for world_size ranks or, without a launcher (None), for the fewest ranks possible.

        Raises ConfigError where the sizes do not fit each other or the ranks.
        """
        data = self._data_size(world_size)
        experts, ranks = self.expert * self.expert_tensor, self.tensor * self.context * data
        if ranks % experts:
            asked = f"parallel.expert={self.expert}"
            if self.expert_tensor > 1:
                asked += f" with parallel.expert_tensor={self.expert_tensor}"
            smallest = self._smallest_data()
            raise ConfigError(
                f"{asked} needs tensor*{'context*' if self.context > 1 else ''}data divisible by {experts}, "
                f"it is {ranks}: set parallel.data={smallest} (or a multiple) or parallel.data=auto, "
                f"and start a multiple of {self._model_ranks() * smallest} ranks"
            )
        world = self._model_ranks() * data
        if world_size is not None and world_size != world:
            raise ConfigError(
                f"{self._model_sizes()} * data={data} makes {world} "
                f"ranks, but {world_size} were started: start {world}, or set parallel.data=auto"
            )
        return Layout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual_pipeline=self._chunks(),
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            data=data,
            sequence=self._sequence(),
            world_size=world,
        )

    def _data_size(self, world_size: int | None) -> int:
        if self.data != "auto":
            return self.data
        if world_size is None:
            return self._smallest_data()
        model_ranks = self._model_ranks()
        if world_size < 1 or world_size % model_ranks:
            raise ConfigError(
                f"parallel.data=auto: {world_size} ranks were started, which {self._model_sizes()} "
                f"= {model_ranks} does not divide: "
                f"start a multiple of {model_ranks} ranks"
            )
        return world_size // model_ranks

    def _smallest_data(self) -> int:
        ranks = self.tensor * self.context
        return math.lcm(self.expert * self.expert_tensor, ranks) // ranks

    def _model_ranks(self) -> int:
        """Ranks of one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def _model_sizes(self) -> str:
        sizes = f"parallel.tensor={self.tensor} * pipeline={self.pipeline}"
        return sizes + (f" * context={self.context}" if self.context > 1 else "")

    def _chunks(self) -> int:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} cuts the layers of a pipeline stage into "
                "chunks, but parallel.pipeline=1: remove parallel.virtual_pipeline or set parallel.pipeline=2"
            )
        return self.virtual_pipeline

    def _sequence(self) -> bool:
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence=true divides activations over the tensor ranks, but parallel.tensor=1: "
                "remove parallel.sequence or set parallel.tensor=2"
            )
        if self.sequence is False and self.tensor > 1 and self.expert > 1:
            raise ConfigError(
                f"parallel.sequence=false with parallel.tensor={self.tensor} and expert={self.expert}: "
                "Megatron needs sequence parallelism where both are above 1: remove parallel.sequence"
            )
        return self.tensor > 1 if self.sequence is None else self.sequence
