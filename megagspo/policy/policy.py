"""The Megatron policy: log-probabilities, gradients, optimizer steps, and its weights in Hugging Face layout.

Every rank calls every method alike and receives the same results; who computes what is decided inside. Ranks
are told all sequences of a mini-batch (token ids are small) and work on their own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagspo.algo.objective import Objective
from megagspo.config.schema import Config, Layout
from megagspo.convert.registry import bound_rules
from megagspo.convert.safetensors_io import HUGGING_FACE, HfCheckpoint, carry_files
from megagspo.model.architecture import quadratic_work, read_architecture, read_config
from megagspo.model.build import build_model
from megagspo.model.context import ContextShare, sequence_multiple
from megagspo.platform.device import Platform
from megagspo.policy.batch import MicroBatch, RowShape, pack
from megagspo.policy.host_memory import HostMemory, state_tensors
from megagspo.policy.megatron_checkpoint import load_state, load_weights, save_state
from megagspo.policy.optimizer import build_optimizer, build_schedule, wrap_data_parallel
from megagspo.policy.packing import Packing, fill, plan_microbatches
from megagspo.policy.reduce import gather_responses, sum_over_ranks, total_over
from megagspo.policy.reference import Reference
from megagspo.policy.schedule import count_multiple, run_micro_batches
from megagspo.policy.scoring import Scored, score, weighted_loss
from megagspo.policy.weights import ModelWeights
from megagspo.types import HfTensors, LogProbs, MiniBatch, TrainSequence

_REFERENCE = "reference"  # folder of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What is known of a gradient beside the gradient, on every rank the same.

    loss: sum over tokens of weight x term; logprobs: of the weights it was taken at; fill: how full the
    packed rows were, the only figure that depends on how the mini-batch was cut.
    """

    loss: float
    logprobs: LogProbs
    fill: dict[str, float]


class MegatronPolicy:
    """A policy on this rank. `version` counts steps: the weights after step v are version v."""

    def __init__(self, config: Config, layout: Layout, platform: Platform, *, total_updates: int) -> None:
        self.config = config
        self.layout = layout
        self.platform = platform
        self.version = 0
        self.updates = 0
        dtype = getattr(torch, config.model.dtype) if config.model.dtype else platform.default_dtype
        self.dtype = dtype
        self.architecture = read_architecture(config.model.path)
        bound, dimensions = bound_rules(read_config(config.model.path))
        recompute = config.trainer.recompute
        # The model's chunks as they are built; `chunks` below are the same, wrapped for data parallelism.
        self._bare = build_model(self.architecture, layout, platform, dtype, recompute=recompute)
        self.weights = ModelWeights(self._bare, layout, bound, dimensions)
        if config.model.checkpoint is None:
            self.weights.load(HfCheckpoint(config.model.path))
        else:
            load_weights(Path(config.model.checkpoint), self._bare)
        self._packing = Packing(
            data_parallel=layout.data,
            token_budget=config.trainer.tokens_per_microbatch,
            multiple=sequence_multiple(layout.context),
            count_multiple=count_multiple(layout),
            quadratic=quadratic_work(self.architecture),
        )
        self.reference = Reference(self._bare) if config.algorithm.needs_reference else None
        with platform.megatron_calls():
            self.chunks = wrap_data_parallel(
                self._bare, dtype, distributed_optimizer=config.trainer.distributed_optimizer
            )
            self.optimizer = build_optimizer(self.chunks, config, dtype)
            self.schedule = build_schedule(self.optimizer, config, total_updates)
        self._host = HostMemory()

    # --- computing ------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TrainSequence], *, temperature: float) -> LogProbs:
        """log pi(token) of every loss token under softmax(logits / temperature), without gradient."""
        own: list[Scored] = []

        def keep(micro: MicroBatch, hidden: Tensor, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            scored = self._score(micro, hidden, temperature)
            own.append(scored)
            return scored.logprobs.sum(), {}

        with torch.no_grad():
            self._run(sequences, keep, forward_only=True)
        return self._gathered(own, sequences)

    def ref_logprobs(self, sequences: Sequence[TrainSequence], *, temperature: float) -> list[Tensor]:
        """As `logprobs`, of the reference policy."""
        assert self.reference is not None
        with self.reference.in_place():
            return self.logprobs(sequences, temperature=temperature).logprobs

    def forward_backward(self, batch: MiniBatch, objective: Objective, *, temperature: float) -> Gradient:
        """Puts the gradient of sum over tokens of weight x term into the gradient buffers."""
        own: list[Scored] = []
        losses: list[Tensor] = []

        def loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if micro.members:
                scored = self._score(micro, hidden, temperature)
                value = weighted_loss(scored, batch, objective)
                own.append(scored)
                losses.append(value.detach())
            else:
                # A micro-batch that only keeps this rank in step: no tokens, a loss of exactly 0 that reaches
                # every parameter before the output matrix.
                value = hidden.sum() * 0.0
            return value, torch.zeros((), dtype=torch.int, device=value.device), {}

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        fill = self._run(batch.sequences, loss, forward_only=False)
        return Gradient(
            loss=sum_over_ranks(losses, contributes=self._is_reporter(), device=self.platform.device),
            logprobs=self._gathered(own, batch.sequences),
            fill=fill,
        )

    def optimizer_step(self) -> tuple[float, float]:
        """One Adam update with the gradients gathered. Returns the gradient norm before clipping, and the
        learning rate."""
        rate = self.optimizer.param_groups[0]["lr"]
        with self.platform.megatron_calls():
            updated, norm, _ = self.optimizer.step()
        assert updated, "float32 and bfloat16 steps are never skipped"
        self.updates += 1
        self.schedule.step(increment=1)
        return float(norm), float(rate)

    def hf_tensors(self) -> HfTensors:
        """The weights as named tensors in Hugging Face layout, on every rank; all ranks must read it to its
        end."""
        return self.weights.stream(self.config.sync.bucket_bytes)

    def lend_device(self) -> int:
        """Moves weights, gradients and optimizer state to host memory, for an engine on the same device;
        returns the bytes given back. Nothing else may be asked of the policy until `take_back_device`."""
        return self._host.take(state_tensors(self.chunks, self.optimizer))

    def take_back_device(self) -> None:
        """Moves them back, bit for bit."""
        self._host.give_back()

    # --- state ----------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes a Megatron distributed checkpoint into an empty directory, all ranks together."""
        if dist.get_rank() == 0:  # a checkpoint explains itself: `convert megatron-to-hf` needs nothing else
            carry_files(Path(self.config.model.path), directory / HUGGING_FACE)
        with self.platform.megatron_calls():
            counters = {"version": self.version, "updates": self.updates}
            save_state(directory, self._bare, self.optimizer, counters)
            if self._renews_reference and self.reference:
                self.reference.save(directory / _REFERENCE)

    def load(self, directory: Path) -> None:
        """Continues from a checkpoint written in any layout: weights, optimizer, learning rate, version."""
        with self.platform.megatron_calls():
            if self._renews_reference and self.reference:  # else it is what the run began with
                self.reference.load(directory / _REFERENCE)
            counters = load_state(directory, self._bare, self.optimizer)
        self.version, self.updates = counters["version"], counters["updates"]
        self.schedule.num_steps = 0
        self.schedule.step(increment=self.updates)

    # --- inside ---------------------------------------------------------------------------------------------

    def _run(self, sequences: Sequence[TrainSequence], loss: Any, *, forward_only: bool) -> dict[str, float]:
        """This rank's micro-batches. Returns how full the rows of all ranks were."""
        plan = plan_microbatches(sequences, self._packing)
        total = total_over(parallel_state.get_context_parallel_group())
        micro_batches = [
            pack(sequences, members, shape=self._row_shape(), total=total, device=self.platform.device)
            for members in plan[parallel_state.get_data_parallel_rank()]
        ]
        run_micro_batches(
            self.chunks,
            micro_batches,
            loss,
            layout=self.layout,
            platform=self.platform,
            forward_only=forward_only,
        )
        return fill(plan, sequences, self._packing)

    def _score(self, micro: MicroBatch, hidden: Tensor, temperature: float) -> Scored:
        return score(
            micro,
            hidden,
            self._bare[-1],
            vocab_size=self.architecture.vocab_size,
            temperature=temperature,
        )

    def _gathered(self, own: Sequence[Scored], sequences: Sequence[TrainSequence]) -> LogProbs:
        """Every sequence's, on every rank."""
        lengths = [sequence.loss_tokens for sequence in sequences]
        logprobs, entropies = (
            gather_responses(
                [
                    (scored.micro.members, scored.micro.tokens, getattr(scored, name).detach())
                    for scored in own
                ],
                lengths,
                contributes=self._is_reporter(),
            )
            for name in ("logprobs", "entropies")
        )
        return LogProbs(logprobs=logprobs, entropies=entropies)

    def _row_shape(self) -> RowShape:
        share = ContextShare(rank=parallel_state.get_context_parallel_rank(), size=self.layout.context)
        return RowShape(share=share, multiple=self.layout.tensor if self.layout.sequence else 1)

    @property
    def _renews_reference(self) -> bool:
        return self.config.algorithm.kl.reference_every > 0

    def _is_reporter(self) -> bool:
        """Of the ranks that compute the same log-probabilities exactly one reports them; context-parallel
        ranks each compute their own."""
        return (
            parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        )
