"""The papers' objectives in plain Python floats, one response and one token at a time, gradients in closed
form.

Written from the papers, and from nothing of megagspo: neither code nor values are imported, so that what
both agree on was computed twice. Sources: GSPO and GSPO-token, arXiv 2507.18071; GRPO 2402.03300; Dr. GRPO
2503.20783; DAPO 2503.14476; CISPO 2506.13585; RLOO 2402.14740; REINFORCE++ 2501.03262; dual clip 1912.09729;
KL estimators http://joschu.net/blog/kl-approx.html; off-policy masking, DeepSeek-V3.2 report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Settings = dict[str, Any]
Sample = dict[str, Any]

# clip_low, clip_high, aggregation, baseline, scale
DEFAULTS: dict[str, tuple[float, float, str, str, str]] = {
    "gspo": (3e-4, 4e-4, "sequence_mean", "group_mean", "group_std"),
    "gspo_token": (3e-4, 4e-4, "sequence_mean", "group_mean", "group_std"),
    "grpo": (0.2, 0.2, "sequence_mean", "group_mean", "group_std"),
    "dr_grpo": (0.2, 0.2, "constant_length", "group_mean", "none"),
    "dapo": (0.2, 0.28, "token_mean", "group_mean", "group_std"),
    "cispo": (1.0, 4.0, "token_mean", "group_mean", "group_std"),  # no ratio is below 1 - 1
    "rloo": (0.2, 0.2, "token_mean", "leave_one_out", "none"),
    "reinforce_pp": (0.2, 0.2, "token_mean", "batch_mean", "batch_std"),
    "hybrid": (0.0, 0.0, "sequence_mean", "group_mean", "group_std"),  # its range: see `settings`
}


def settings(algorithm: Settings) -> Settings:
    """What the algorithm section of a configuration means, defaults filled in."""
    name = algorithm.get("name", "gspo")
    low, high, aggregation, baseline, scale = DEFAULTS[name]
    a = algorithm.get("hybrid_weight", 0.5)
    if name == "hybrid":  # ln(1 + eps) = a ln(1 + eps_gspo) + (1 - a) ln(1 + eps_grpo), the low end likewise
        low = 1 - (1 - 3e-4) ** a * (1 - 0.2) ** (1 - a)
        high = (1 + 4e-4) ** a * (1 + 0.2) ** (1 - a) - 1
    return {
        "name": name,
        "low": 1 - algorithm.get("clip_low", low),
        "high": 1 + algorithm.get("clip_high", high),
        "aggregation": algorithm.get("aggregation", aggregation),
        "length_constant": algorithm.get("length_constant"),
        "advantage": {"baseline": baseline, "scale": scale, "ddof": 1, "eps": 1e-6}
        | algorithm.get("advantage", {}),
        "kl": {"coefficient": 0.0, "estimator": "k3", "where": "loss"} | algorithm.get("kl", {}),
        "dual_clip": algorithm.get("dual_clip", math.inf),
        "most": algorithm.get("log_ratio_max", 20.0),
        "a": {"gspo_token": 1.0, "hybrid": a}.get(name, 0.0),
        "old": "rollout_logprobs" if algorithm.get("old_logprobs") == "rollout" else "old_logprobs",
        "correction": {
            "mode": "none", "level": "token", "sequence_form": "geometric_mean", "low": 0.5, "high": 2.0
        } | algorithm.get("correction", {}),
        "threshold": algorithm.get("off_policy_mask", {}).get("threshold", math.inf),
    }  # fmt: skip


def evaluate(algorithm: Settings, samples: Sequence[Sample]) -> dict[str, Any]:
    """loss, advantages (one a token), gradients d loss / d train_logprobs and clipped tokens of the samples
    as they stand in a file of vectors; 0 and false where the mask is 0."""
    s = settings(algorithm)
    rows = [learned(sample) for sample in samples]
    kept = [row for row in rows if row["train_logprobs"]]
    advantages = all_advantages(s, kept)
    total = 0.0
    results = []
    for row, own in zip(kept, advantages, strict=True):
        weight = token_weight(s, row, kept)
        terms, slopes, clipped = response_terms(s, row, own)
        total += weight * math.fsum(terms)
        results.append((own, [weight * slope for slope in slopes], clipped))
    remaining = iter(results)
    nothing: tuple[list[float], list[float], list[bool]] = ([], [], [])
    placed = [next(remaining) if row["train_logprobs"] else nothing for row in rows]
    return {
        "loss": total,
        "advantages": [at_mask(s_, own, 0.0) for s_, (own, _, _) in zip(samples, placed, strict=True)],
        "gradients": [at_mask(s_, slopes, 0.0) for s_, (_, slopes, _) in zip(samples, placed, strict=True)],
        "clipped": [at_mask(s_, sides, False) for s_, (_, _, sides) in zip(samples, placed, strict=True)],
    }


def learned(sample: Sample) -> Sample:
    """The sample's values at the tokens whose mask is 1."""
    mask = sample["mask"]
    return {
        key: [v for v, m in zip(value, mask, strict=True) if m] if isinstance(value, list) else value
        for key, value in sample.items()
    }


def at_mask(sample: Sample, values: Sequence[Any], elsewhere: Any) -> list[Any]:
    own = iter(values)
    return [next(own) if m else elsewhere for m in sample["mask"]]


def token_weight(s: Settings, row: Sample, kept: Sequence[Sample]) -> float:
    sizes = [len(other["train_logprobs"]) for other in kept]
    if s["aggregation"] == "token_mean":
        return 1 / sum(sizes)
    divisor = s["length_constant"] if s["aggregation"] == "constant_length" else len(row["train_logprobs"])
    return 1 / len(sizes) / divisor


# --- advantages ---------------------------------------------------------------------------------------------


def all_advantages(s: Settings, kept: Sequence[Sample]) -> list[list[float]]:
    """A_it: (return - baseline) / (std + eps), or what the sample gives itself."""
    returns = [response_returns(s, row) for row in kept]
    found = []
    for row, own in zip(kept, returns, strict=True):
        group = [r for other, r in zip(kept, returns, strict=True) if other["group"] == row["group"]]
        others = [r for r in group if r is not own]
        given = row.get("token_advantages")
        found.append(given or centred(s["advantage"], own, group=group, others=others, batch=returns))
    return found


def response_returns(s: Settings, row: Sample) -> list[float]:
    """The reward at every token; with KL in the reward less the whole penalty, or for REINFORCE++ less that
    of this and all later tokens."""
    size = len(row["train_logprobs"])
    if s["kl"]["where"] == "loss" or s["kl"]["coefficient"] == 0:
        return [row["reward"]] * size
    penalties = [
        s["kl"]["coefficient"] * kl(s, reference - old)[0]
        for old, reference in zip(row[s["old"]], row["ref_logprobs"], strict=True)
    ]
    starts = range(size) if s["name"] == "reinforce_pp" else [0] * size
    return [row["reward"] - math.fsum(penalties[start:]) for start in starts]


def centred(
    how: Settings,
    own: list[float],
    *,
    group: list[list[float]],
    others: list[list[float]],
    batch: list[list[float]],
) -> list[float]:
    populations = {
        "group_mean": group, "leave_one_out": group, "batch_mean": batch,
        "group_std": group, "batch_std": batch,
    }  # fmt: skip
    for word in (how["baseline"], how["scale"]):
        if word != "none" and len({value for response in populations[word] for value in response}) == 1:
            return [0.0] * len(own)
    averaged = others if how["baseline"] == "leave_one_out" else populations.get(how["baseline"], [[0.0]])
    baseline = statistics.fmean(statistics.fmean(response) for response in averaged)
    divisor = 1.0
    if how["scale"] != "none":
        population = populations[how["scale"]]
        centre = statistics.fmean(statistics.fmean(response) for response in population)
        squares = [statistics.fmean((v - centre) ** 2 for v in response) for response in population]
        divisor = math.sqrt(math.fsum(squares) / (len(population) - how["ddof"])) + how["eps"]
    return [(value - baseline) / divisor for value in own]


# --- terms --------------------------------------------------------------------------------------------------


def response_terms(
    s: Settings, row: Sample, advantages: Sequence[float]
) -> tuple[list[float], list[float], list[bool]]:
    """Of one response: the term of each token, the derivative of their sum by each log-probability, and
    which tokens are clipped."""
    new, old = row["train_logprobs"], row[s["old"]]
    size = len(new)
    differences = [n - o for n, o in zip(new, old, strict=True)]
    mean = math.fsum(differences) / size
    factors = [c * keep(s, row, advantages) for c in corrections(s["correction"], row, s["most"])]
    terms, slopes, clipped = [], [0.0] * size, []
    for t, advantage in enumerate(advantages):
        if s["name"] == "cispo":
            ratio, _ = exp(differences[t], s["most"])
            term, by_logprob = -min(ratio, s["high"]) * advantage * new[t], -min(ratio, s["high"]) * advantage
            side = ratio > s["high"]
        else:
            exponent = mean if s["name"] == "gspo" else s["a"] * mean + (1 - s["a"]) * differences[t]
            ratio, by_exponent = exp(exponent, s["most"])
            term, by_ratio, side = surrogate(s, ratio, advantage)
            by_logprob = by_ratio * by_exponent
        terms.append(factors[t] * term)
        clipped.append(side)
        if s["name"] == "gspo":  # every token has a part in the ratio of every other
            slopes = [slope + factors[t] * by_logprob / size for slope in slopes]
        else:  # sg: only the token's own
            slopes[t] += factors[t] * by_logprob
    if s["kl"]["where"] == "loss" and s["kl"]["coefficient"] > 0:
        estimates = [kl(s, r - n) for n, r in zip(new, row["ref_logprobs"], strict=True)]
        terms = [term + s["kl"]["coefficient"] * k for term, (k, _) in zip(terms, estimates, strict=True)]
        slopes = [
            slope - s["kl"]["coefficient"] * by for slope, (_, by) in zip(slopes, estimates, strict=True)
        ]
    return terms, slopes, clipped


def exp(x: float, most: float) -> tuple[float, float]:
    """exp of x kept within +-most, and its derivative."""
    value = math.exp(min(max(x, -most), most))
    return value, value if abs(x) <= most else 0.0


def surrogate(s: Settings, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """-min(w A, clip(w) A), kept above c A for A < 0; its derivative by w; whether w is outside the range
    and the derivative therefore 0."""
    cut = min(max(ratio, s["low"]), s["high"]) * advantage
    objective, slope = min(ratio * advantage, cut), advantage
    outside = not s["low"] <= ratio <= s["high"]
    if cut < ratio * advantage and outside:
        slope = 0.0
    if advantage < 0 and objective < s["dual_clip"] * advantage:
        objective, slope = s["dual_clip"] * advantage, 0.0
    return -objective, -slope, outside and slope == 0.0 and advantage != 0.0


def kl(s: Settings, x: float) -> tuple[float, float]:
    """The estimate from x = log q - log p, and its derivative by x."""
    if s["kl"]["estimator"] == "k1":
        return -x, -1.0
    if s["kl"]["estimator"] == "k2":
        return x * x / 2, x
    kept = min(max(x, -s["most"]), s["most"])
    return math.expm1(kept) - kept, math.expm1(kept) if kept == x else 0.0


def corrections(how: Settings, row: Sample, most: float) -> list[float]:
    """c = exp(log of the trainer before the updates - log of the rollout engine), cut or masked."""
    if how["mode"] == "none":
        return [1.0] * len(row["train_logprobs"])
    differences = [o - r for o, r in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
    if how["level"] == "sequence":
        whole = math.fsum(differences)
        if how["sequence_form"] == "geometric_mean":
            whole /= len(differences)
        differences = [whole] * len(differences)
    found = [exp(x, most)[0] for x in differences]
    if how["mode"] == "truncate":
        return [min(c, how["high"]) for c in found]
    return [c if how["low"] <= c <= how["high"] else 0.0 for c in found]


def keep(s: Settings, row: Sample, advantages: Sequence[float]) -> float:
    """0 for a response with a negative advantage whose mean log p_rollout - log p_train is above the
    threshold, 1 for all others."""
    if s["threshold"] == math.inf:
        return 1.0
    gaps = [r - n for r, n in zip(row["rollout_logprobs"], row["train_logprobs"], strict=True)]
    return 0.0 if statistics.fmean(gaps) > s["threshold"] and statistics.fmean(advantages) < 0 else 1.0
