"""A step's metrics from its records, by the names that DESIGN fixes. A key that does not apply is left out,
never 0."""

from __future__ import annotations

import math
import resource
import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.schema import RewardConfig
from megagspo.observe.progress import StepTimer
from megagspo.stages import Experience, Update
from megagspo.types import Sample


def full_reward(rewards: Sequence[RewardConfig]) -> float:
    """What a response gets that reaches every positive reward in full, less a hair for rounding."""
    return sum(max(entry.weight, 0.0) for entry in rewards) - 1e-9


def reward_metrics(samples: Sequence[Sample], rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """Over trainable samples; a group is solved by a response that reaches every positive reward in full."""
    kept = [sample for sample in samples if sample.trainable]
    full = full_reward(rewards)
    groups: dict[str, list[bool]] = defaultdict(list)
    for sample in kept:
        groups[sample.group].append(sample.reward >= full)
    values = [sample.reward for sample in kept]
    lengths = [len(sample.completion.token_ids) for sample in kept]
    return {
        "reward/mean": statistics.fmean(values),
        "reward/std": statistics.pstdev(values),
        "reward/solve_none": statistics.fmean(not any(solved) for solved in groups.values()),
        "reward/solve_all": statistics.fmean(all(solved) for solved in groups.values()),
        "response/length_mean": statistics.fmean(lengths),
        "response/truncated_fraction": statistics.fmean(s.completion.finish_reason == "length" for s in kept),
    }


def mismatch_metrics(data: Experience, config: AlgorithmConfig) -> dict[str, float]:
    """Trainer against engine before any update, x = log pi_trainer - log pi_engine at each response token.

    k3 = mean(exp(x) - 1 - x), an estimate of KL(engine || trainer); ratio_in_eps: the mean over responses of
    their mean x, in units of the clip range on its side, so that 1 means a response starts at the edge.
    Absent when the trainer's log-probabilities were not computed.
    """
    if data.trainer_logprobs is None:
        return {}
    pairs = list(zip(data.trainer_logprobs, data.rollout_logprobs, strict=True))
    x = torch.cat([trainer - rollout for trainer, rollout in pairs]).double()
    upper, lower = math.log1p(config.clip_high), -math.log1p(-config.clip_low)
    means = [(trainer - rollout).double().mean().item() for trainer, rollout in pairs]
    return {
        "mismatch/logprob_abs_mean": x.abs().mean().item(),
        "mismatch/k3": (x.exp() - 1 - x).mean().item(),
        "mismatch/ratio_in_eps": statistics.fmean(m / (upper if m >= 0 else lower) for m in means),
    }


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Over the step's optimizer updates: losses and norms are averaged, shares are of all tokens."""
    total = {name: math.fsum(u.sums[name] for u in updates) for name in updates[0].sums}
    tokens = total["tokens"]
    return {
        "policy/loss": statistics.fmean(u.sums["loss"] for u in updates),
        "policy/grad_norm": statistics.fmean(u.grad_norm for u in updates),
        "policy/entropy": total["entropy"] / tokens,
        "optim/lr": updates[-1].learning_rate,
    }


def ratio_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Importance ratios and clipping over the step's updates, by tokens."""
    total = {name: math.fsum(u.sums[name] for u in updates) for name in updates[0].sums}
    tokens = total["tokens"]
    return {
        "policy/ratio_mean": total["ratio"] / tokens,
        "policy/ratio_max": max(u.sums["ratio_max"] for u in updates),
        "policy/clip_fraction": (total["clipped_low"] + total["clipped_high"]) / tokens,
        "policy/clip_fraction_low": total["clipped_low"] / tokens,
        "policy/clip_fraction_high": total["clipped_high"] / tokens,
    }


def speed_metrics(timer: StepTimer, updates: Sequence[Update]) -> dict[str, float]:
    """Seconds by stage, and rates over the whole step so far. Tokens are those trained on, prompts included;
    packing_efficiency: their share of the places in packed rows, where all ranks wait for the longest row.
    """
    total = timer.total()
    sums = {
        name: math.fsum(u.sums[name] for u in updates)
        for name in ("packed_tokens", "packed_places", "sequences")
    }
    return {
        **{f"time/{stage}": value for stage, value in timer.seconds.items()},
        "time/step": total,
        "perf/tokens_per_second": sums["packed_tokens"] / total,
        "perf/samples_per_second": sums["sequences"] / total,
        "perf/packing_efficiency": sums["packed_tokens"] / sums["packed_places"],
        # ru_maxrss is in KiB on Linux: the peak of this process, on the first rank.
        "memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
