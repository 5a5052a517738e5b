"""Every key of the configuration, with its default. A key that nothing reads does not exist.

Larger sections have a file of their own: `algorithm.py`, `layout.py` (parallel), `sources.py` (data).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megagspo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megagspo.config.layout import Layout, ParallelConfig
from megagspo.config.section import AtLeastOne, NotNegative, NotNegativeInt, Positive, Section, Text
from megagspo.config.sources import DataConfig, JsonlSource, ReasoningGymSource, Source

__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "JsonlSource",
    "Layout",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlatformConfig",
    "ReasoningGymSource",
    "Recompute",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "Source",
    "SyncConfig",
    "TrainerConfig",
]


class RunConfig(Section):
    """Where a run keeps its files, and its seed."""

    name: Text = "run"
    """Name of the run; its files are in dir/name. A run started again under the same name resumes."""
    dir: Text = "runs"
    """The directory that holds runs."""
    seed: NotNegativeInt = 0
    """Every random choice of the run derives from it."""


class ModelConfig(Section):
    """The model that is trained."""

    path: Text
    """Hugging Face directory of the model: configuration, tokenizer and, without a checkpoint, weights."""
    checkpoint: Text | None = None
    """Megatron checkpoint directory to take the weights from instead."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of weights and activations; null: float32 on a CPU, bfloat16 on a GPU."""


class PlatformConfig(Section):
    """What the ranks run on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs where there are some."""
    threads_per_rank: AtLeastOne = 1
    """Threads each rank computes with on a CPU."""


class RolloutConfig(Section):
    """How responses are made. A step takes prompts * responses samples."""

    engine: Literal["embedded"] = "embedded"
    """embedded: transformers inside the trainer's own process."""
    prompts: AtLeastOne = 32
    """Prompts a step."""
    responses: AtLeastOne = 16
    """Responses to each prompt: the size of a group."""
    response_length_max: AtLeastOne = 64
    """Tokens after which a response is cut off."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are under softmax(logits / temperature) on every side."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = -1
    """Sample from this many likeliest tokens; -1: from all."""
    stop_ids: Annotated[tuple[NotNegativeInt, ...], Field(strict=False)] = ()
    """Token ids that end a response; empty: the tokenizer's end of sequence."""
    replay: Text | None = None
    """Train on the rollouts saved in this directory instead of making new ones."""

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError(f"must be -1 (no limit) or at least 1, not {value}")
        return value


class RewardConfig(Section):
    """One reward. A sample's reward is the sum of weight * reward over the list."""

    name: Literal["exact", "math", "reasoning_gym"]
    """exact: the response is the answer; math: it equals it mathematically; reasoning_gym: the task's."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class SftConfig(Section):
    """The supervised warm-up."""

    sequences: AtLeastOne = 96
    """Sequences a step."""


Recompute = Literal["none", "full", "selective"]


class TrainerConfig(Section):
    """How much is trained, and in what pieces."""

    steps: AtLeastOne = 100
    """Steps of the run."""
    minibatches: AtLeastOne = 4
    """Optimizer updates an epoch: a step's samples are divided into so many mini-batches."""
    epochs: AtLeastOne = 1
    """Passes over a step's samples (mu of GRPO); each divides them anew."""
    tokens_per_microbatch: AtLeastOne = 4096
    """Tokens packed into one forward and backward pass, which context-parallel ranks share: bounds memory,
    changes no result."""
    recompute: Recompute = "none"
    """Activations that backward computes again instead of keeping them, to save memory: none, those of every
    layer (full), those inside the MLPs and experts (selective)."""
    distributed_optimizer: bool = True
    """Divide the optimizer's state over the data-parallel ranks."""


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule, counted in optimizer updates."""

    name: Literal["adam"] = "adam"
    """The optimizer: Adam with decoupled weight decay."""
    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: NotNegative = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    warmup_steps: NotNegativeInt = 0
    """The learning rate rises linearly from 0 over so many steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes from lr to lr_min over the remaining steps; constant stays at lr."""
    lr_min: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""


class SyncConfig(Section):
    """How new weights reach the engine."""

    method: Literal["in_process"] = "in_process"
    """in_process: tensors are handed over inside the process."""
    bucket_bytes: AtLeastOne = 64 * 2**20
    """Tensors are gathered and sent in pieces of about this size."""


class CheckpointConfig(Section):
    """When the run's state is saved."""

    every: NotNegativeInt = 10
    """Steps between checkpoints; 0: only at the end."""
    keep: AtLeastOne = 2
    """How many checkpoints are kept, newest first."""
    save_hf: bool = False
    """Also write the model in Hugging Face layout at the end."""


class EvalConfig(Section):
    """Evaluation during training."""

    every: NotNegativeInt = 0
    """Steps between evaluations; 0: never."""
    samples: AtLeastOne = 1
    """Responses to each evaluation prompt."""


class ObserveConfig(Section):
    """Where metrics go, beside metrics.jsonl."""

    tensorboard: bool = True
    """Also write TensorBoard files."""


class Config(Section):
    """A whole run. Made by `load_config`; every value is concrete or has a documented null."""

    run: RunConfig = RunConfig()
    """Where a run keeps its files, and its seed."""
    model: ModelConfig
    """The model that is trained."""
    platform: PlatformConfig = PlatformConfig()
    """What the ranks run on."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks are divided."""
    data: DataConfig
    """Where prompts come from."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are made."""
    reward: Annotated[tuple[RewardConfig, ...], Field(strict=False, min_length=1)] = (
        RewardConfig(name="exact"),
    )
    """A list of rewards, for instance [{name: math, weight: 1.0}]."""
    sft: SftConfig = SftConfig()
    """The supervised warm-up."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The objective."""
    trainer: TrainerConfig = TrainerConfig()
    """How much is trained, and in what pieces."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its learning-rate schedule."""
    sync: SyncConfig = SyncConfig()
    """How new weights reach the engine."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run's state is saved."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    observe: ObserveConfig = ObserveConfig()
    """Where metrics go."""

    @property
    def run_dir(self) -> Path:
        """The directory that holds all files of the run."""
        return Path(self.run.dir) / self.run.name

    @field_validator("reward")
    @classmethod
    def _rewards_differ(cls, rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        """A sample keeps its rewards by name."""
        names = [reward.name for reward in rewards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"reward {name} is listed twice: keep one of them")
        return rewards
