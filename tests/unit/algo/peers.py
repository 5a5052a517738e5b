"""Two peers, TRL and verl: their losses called on the samples of a vector, whose results ours can be compared
with.

Neither is a dependency: without it, its tests are skipped. Written against TRL 1.16.0 and verl 0.9.1.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.conformance.evaluation import Outcome, evaluate
from megagspo.conformance.vectors import Vector
from tests.conformance.generate import draw

SCALES = {"gspo": 1e-3, "gspo_token": 1e-3}  # of what lies between two policies; 0.3 for token ratios


def peer(module: str) -> Any:
    """The module, or a skip that says why: they fail in many ways when a part of them is missing."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        pytest.skip(f"{module} cannot be imported here: {type(error).__name__}: {error}")


def trl_trainer() -> Any:
    return peer("trl.trainer.grpo_trainer").GRPOTrainer


def verl_core() -> Any:
    return peer("verl.trainer.ppo.core_algos")


class Case:
    """Samples as vectors have them, and as padded matrices [B, T] with a mask."""

    def __init__(self, name: str, seed: int, *, masked_in_full: bool = False, far: float = 1.0) -> None:
        masks = {1: [0] * 5} if masked_in_full else None
        scale = far * SCALES.get(name, 0.3)
        self.samples = draw(seed, scale, rollout=0.3, reference=0.5, masks=masks)
        self.mask = self.matrix("mask")
        self.train = self.matrix("train_logprobs").requires_grad_()

    def matrix(self, key: str) -> Tensor:
        width = max(len(sample["mask"]) for sample in self.samples)
        rows = [[*sample[key], *[0.0] * (width - len(sample[key]))] for sample in self.samples]
        return torch.tensor(rows, dtype=torch.float64)

    def ours(self, name: str, **keys: Any) -> Outcome:
        entry = {"name": "case", "algorithm": {"name": name, **keys}, "samples": self.samples}
        return evaluate(Vector.model_validate(entry))

    def advantages(self, outcome: Outcome) -> Tensor:
        """Ours, [B]: peers are given the same."""
        return torch.tensor(outcome.advantages, dtype=torch.float64)

    def gradient(self, loss: Tensor) -> list[list[float]]:
        """By train_logprobs, row by row without the padding."""
        (slopes,) = torch.autograd.grad(loss, self.train)
        return [row[: len(sample["mask"])] for row, sample in zip(slopes.tolist(), self.samples, strict=True)]


def agree(case: Case, outcome: Outcome, loss: Tensor, *, rel: float = 1e-12) -> None:
    assert loss.item() == pytest.approx(outcome.loss, abs=rel)  # a mean of numbers near 1 that cancel
    for row, slopes in zip(case.gradient(loss), outcome.gradients, strict=True):
        assert row == pytest.approx(slopes, rel=rel, abs=1e-14)


def clipped_share(outcome: Outcome, case: Case) -> float:
    """Of tokens."""
    return sum(map(sum, outcome.clipped)) / float(case.mask.sum())


class Accelerator:
    num_processes = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def trl_loss(
    case: Case,
    given: Tensor,
    *,
    loss_type: str = "grpo",
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    corrected_kl: bool = False,
    threshold: float | None = None,
    longest: int = 8,
) -> tuple[Tensor, dict[str, float]]:
    """GRPOTrainer's own loss, of a trainer that has nothing but what the loss reads."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            case.train,
            torch.zeros_like(case.train),
            None,
        ),
        get_off_policy_mask=trl_trainer().get_off_policy_mask,
        accelerator=Accelerator(),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=corrected_kl, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        off_policy_mask_threshold=threshold,
        max_completion_length=longest,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
    )
    empty = torch.zeros(len(case.samples), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(case.mask, dtype=torch.int64),
        "completion_mask": case.mask,
        "advantages": given,
        "old_per_token_logps": case.matrix("old_logprobs"),
        "sampling_per_token_logps": case.matrix("rollout_logprobs"),
        "ref_per_token_logps": case.matrix("ref_logprobs"),
        "num_items_in_batch": case.mask.sum(),
    }
    loss = trl_trainer()._compute_loss(trainer, None, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def verl_loss(
    case: Case,
    given: Tensor,
    *,
    policy: str = "vanilla",
    aggregation: str = "seq-mean-token-mean",
    low: float = 0.2,
    high: float = 0.2,
    dual_clip: float = 1e9,
    divisor: int | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """dual_clip: verl's own default is 3; a number beyond every ratio switches it off."""
    config = peer("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual_clip,
        global_batch_info={} if divisor is None else {"loss_scale_factor": divisor},
    )
    return verl_core().get_policy_loss_fn(policy)(
        old_log_prob=case.matrix("old_logprobs"),
        log_prob=case.train,
        advantages=given[:, None].expand_as(case.mask),
        response_mask=case.mask,
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )


def verl_advantages(
    function: Any, rewards: Sequence[float], groups: Sequence[str], **more: Any
) -> list[float]:
    """Of responses of two tokens, the reward on the last, in float32 as verl has it."""
    import numpy as np

    scores = torch.tensor([[0.0, reward] for reward in rewards])
    found, _ = function(
        token_level_rewards=scores, response_mask=torch.ones_like(scores), index=np.array(groups), **more
    )
    return [row[0] for row in found.tolist()]
