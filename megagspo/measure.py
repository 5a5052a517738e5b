"""A step's metrics from its records, by the names that DESIGN fixes. A key that does not apply is left out,
never 0."""

from __future__ import annotations

import math
import resource
import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from megagspo.algo.kl import ESTIMATORS, kl_estimate
from megagspo.algo.objective import Objective, Terms, token_batch
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
    """Trainer against engine before any update, x = log pi_trainer - log pi_engine at each loss token.

    k3 = mean(exp(x) - 1 - x), an estimate of KL(engine || trainer); ratio_in_eps: the mean over responses of
    their mean x, in units of the clip range on its side, so that 1 means a response starts at the edge; the
    same for the shortest, middle and longest third of the responses. Absent when the trainer's
    log-probabilities were not computed.
    """
    if data.trainer_logprobs is None:
        return {}
    x = _differences(data.trainer_logprobs, data.rollout_logprobs)
    in_eps = [_in_eps(values, config) for values in x]
    flat = torch.cat(x)
    by_length = sorted(range(len(x)), key=lambda i: len(x[i]))
    third = max(1, len(x) // 3)
    thirds = {"short": by_length[:third], "middle": by_length[third:-third], "long": by_length[-third:]}
    return {
        "mismatch/logprob_abs_mean": flat.abs().mean().item(),
        "mismatch/k3": (flat.expm1() - flat).mean().item(),
        "mismatch/ratio_in_eps": statistics.fmean(in_eps),
        **{
            f"mismatch/ratio_in_eps_{name}": statistics.fmean(in_eps[i] for i in members)
            for name, members in thirds.items()
            if members
        },
    }


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Over the step's optimizer updates: losses and norms are averaged, entropy is of all loss tokens."""
    entropies = torch.cat([e for u in updates for e in u.gradient.logprobs.entropies])
    return {
        "policy/loss": statistics.fmean(u.gradient.loss for u in updates),
        "policy/grad_norm": statistics.fmean(u.grad_norm for u in updates),
        "policy/entropy": entropies.double().mean().item(),
        "optim/lr": updates[-1].learning_rate,
    }


def objective_metrics(
    updates: Sequence[Update], objective: Objective, config: AlgorithmConfig
) -> dict[str, float]:
    """Ratios, clipping, advantages and KL over the step's updates, computed from whole mini-batches: the same
    however they were cut.

    Shares are of loss tokens, or of responses where the name ends in `_sequences` (a response counts when any
    of its tokens is clipped). effective_sample_size: (sum w)^2 / sum w^2 of the tokens' ratios, as a share of
    their number. staleness/ratio_in_eps: as `mismatch/ratio_in_eps`, of the policy during the updates against
    what the ratio is taken against.
    """
    scored = [(u, _terms(u, objective)) for u in updates]
    ratio = torch.cat([terms.ratio for _, terms in scored]).double()
    low, high = (torch.cat([getattr(t, f"clipped_{side}") for _, t in scored]) for side in ("low", "high"))
    sides = {"low": low, "high": high, "": low | high}
    lengths = [s.loss_tokens for u in updates for s in u.batch.sequences]
    quantiles = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    p01, p50, p99 = _quantiles(ratio, quantiles)
    stale = [
        values for u in updates for values in _differences(u.gradient.logprobs.logprobs, u.batch.old_logprobs)
    ]
    advantages = torch.cat([a for u in updates for a in u.batch.advantages]).double()
    metrics = {
        "policy/ratio_mean": ratio.mean().item(),
        "policy/ratio_max": ratio.max().item(),
        "policy/ratio_p01": p01,
        "policy/ratio_p50": p50,
        "policy/ratio_p99": p99,
        "policy/log_ratio_abs_mean": torch.cat(stale).abs().mean().item(),
        "policy/effective_sample_size": (ratio.sum() ** 2 / ratio.square().sum() / len(ratio)).item(),
        "staleness/ratio_in_eps": statistics.fmean(_in_eps(values, config) for values in stale),
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(correction=0).item(),
        "advantage/abs_max": advantages.abs().max().item(),
        "advantage/zero_fraction": (advantages == 0).double().mean().item(),
    }
    for side, clipped in sides.items():
        suffix = f"_{side}" if side else ""
        metrics[f"policy/clip_fraction{suffix}"] = clipped.double().mean().item()
        metrics[f"policy/clip_fraction{suffix}_sequences"] = statistics.fmean(
            bool(piece.any()) for piece in clipped.split(lengths)
        )
    return metrics | _reference_metrics(updates, config)


def _reference_metrics(updates: Sequence[Update], config: AlgorithmConfig) -> dict[str, float]:
    """KL(policy || reference) at the policy of each update, by all three estimators; kl_ref is the configured
    one."""
    if not config.needs_reference:
        return {}
    new = torch.cat([v for u in updates for v in u.gradient.logprobs.logprobs]).double()
    reference = torch.cat([v for u in updates for v in u.batch.ref_logprobs or ()]).double()
    estimates = {
        name: kl_estimate(new, reference, estimator=name, log_ratio_max=config.log_ratio_max).mean().item()
        for name in ESTIMATORS
    }
    return {f"policy/kl_ref_{name}": value for name, value in estimates.items()} | {
        "policy/kl_ref": estimates[config.kl.estimator]
    }


def _terms(update: Update, objective: Objective) -> Terms:
    """The objective's terms at the policy of the update, for the whole mini-batch."""
    logprobs, members = update.gradient.logprobs, range(len(update.batch.sequences))
    with torch.no_grad():
        return objective(
            token_batch(update.batch, members, torch.cat(logprobs.logprobs), torch.cat(logprobs.entropies))
        )


def _differences(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [(x.double() - y.double()) for x, y in zip(a, b, strict=True)]


def _in_eps(log_ratio: Tensor, config: AlgorithmConfig) -> float:
    """A response's mean log-ratio in units of ln(1 + clip_high), or of -ln(1 - clip_low) when it is
    negative; with no lower bound, of ln(1 + clip_high) on both sides."""
    mean = log_ratio.mean().item()
    upper = math.log1p(config.clip_high)
    lower = -math.log1p(-config.clip_low) if config.clip_low is not None else upper
    return mean / (upper if mean >= 0 else lower)


def _quantiles(values: Tensor, shares: Tensor) -> list[float]:
    """torch.quantile stops at 16 million values; sorting does not."""
    ordered = values.sort().values
    return ordered[((len(ordered) - 1) * shares).round().long()].tolist()


def speed_metrics(timer: StepTimer, updates: Sequence[Update]) -> dict[str, float]:
    """Seconds by stage, and rates over the whole step so far. Tokens are those trained on, prompts included;
    packing_efficiency: estimated work over what the ranks take for it when in every turn all wait for the
    dearest row (`policy/packing.py`).
    """
    total = timer.total()
    sums = {
        name: math.fsum(u.gradient.fill[name] for u in updates)
        for name in ("packed_work", "packed_work_waited", "packed_tokens", "sequences")
    }
    return {
        **{f"time/{stage}": value for stage, value in timer.seconds.items()},
        "time/step": total,
        "perf/tokens_per_second": sums["packed_tokens"] / total,
        "perf/samples_per_second": sums["sequences"] / total,
        "perf/packing_efficiency": sums["packed_work"] / sums["packed_work_waited"],
        # ru_maxrss is in KiB on Linux: the peak of this process, on the first rank.
        "memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
