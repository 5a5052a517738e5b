"""Writes the vectors of this folder: inputs drawn from fixed seeds, results from the papers' formulas.

Run `python tests/conformance/generate.py`, or with a directory to write them elsewhere. Nothing of megagspo
is used, see `papers.py`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.insert(0, str(HERE.parents[1]))  # run as a script

from tests.conformance.papers import DEFAULTS, Sample, Settings, evaluate  # noqa: E402

Entry = dict[str, Any]

LENGTHS = [1, 5, 3, 2, 6, 4]
GROUPS = ["a", "b", "a", "b", "a", "b"]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.25, 0.5]
HOLE = {4: [1, 1, 0, 0, 1, 1]}  # sample 4 has a turn of the environment in its middle
WIDE = {"clip_low": 0.2, "clip_high": 0.27, "allow_wide_clip": True}


def draw(
    seed: int,
    off: float,
    *,
    rollout: float | None = None,
    reference: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    groups: Sequence[str | int] = GROUPS,
    rewards: Sequence[float] = REWARDS,
    masks: dict[int, list[int]] | None = None,
) -> list[Sample]:
    """Responses whose log-probabilities before the updates are off by about `off` a token, those of the
    engine by `rollout` from the trainer's before, those of the reference by `reference` from the policy's.

    Only `random()` is drawn from, whose numbers are the same in every Python.
    """
    generator = random.Random(seed)
    masks = masks or (HOLE if lengths is LENGTHS else {})

    def near(values: Sequence[float], scale: float) -> list[float]:
        return [round(min(v + 3.5 * scale * (generator.random() - 0.5), 0.0), 6) for v in values]

    samples = []
    for i, (length, group, reward) in enumerate(zip(lengths, groups, rewards, strict=True)):
        train = [round(-0.1 - 4 * generator.random(), 6) for _ in range(length)]
        old = near(train, off)
        sample = {
            "group": group,
            "reward": reward,
            "mask": masks.get(i, [1] * length),
            "train_logprobs": train,
            "old_logprobs": old,
        }
        if rollout is not None:
            sample["rollout_logprobs"] = near(old, rollout)
        if reference is not None:
            sample["ref_logprobs"] = near(train, reference)
        samples.append(sample)
    return samples


def case(title: str, samples: list[Sample], note: str = "", **algorithm: Any) -> Entry:
    """An entry with the papers' results; algorithm: as in a configuration."""
    result = evaluate(algorithm, samples)
    own = [
        {v for v, m in zip(values, sample["mask"], strict=True) if m} or {0.0}
        for values, sample in zip(result["advantages"], samples, strict=True)
    ]
    result["advantages"] = [
        one.pop() if len(one) == 1 else values for one, values in zip(own, result["advantages"], strict=True)
    ]
    return {"name": title, "note": note, "algorithm": algorithm, "samples": samples, "expect": result}


def with_token_advantages(samples: list[Sample], seed: int) -> list[Sample]:
    generator = random.Random(seed)
    return [
        sample | {"token_advantages": [round(3 * (generator.random() - 0.5), 3) for _ in sample["mask"]]}
        for sample in samples
    ]


def gspo() -> list[Entry]:
    pair = draw(6, 0.0, lengths=[2, 8], groups=["a", "a"], rewards=[1.0, -1.0])
    behind = draw(5, 2e-4, rollout=5e-4)
    return [
        case("gspo default range", draw(1, 1e-3), "responses clipped on both sides", name="gspo"),
        case("gspo is the default", draw(2, 3e-4), "no algorithm named"),
        case("gspo wide range", draw(3, 0.5), "ratios far from 1", name="gspo", **WIDE),
        case("gspo on-policy", draw(4, 0.0), "all ratios 1: the gradient is -A_i / (N |y_i|)", name="gspo"),
        case("gspo against the engine", behind, "its ratios are ours", name="gspo", old_logprobs="rollout"),
        case(
            "gspo length 2 against length 8",
            pair,
            "ratio 1, advantages +1 and -1: the loss is 0, not 0.6",
            name="gspo",
            advantage={"scale": "none"},
        ),
    ]


def gspo_token() -> list[Entry]:
    one_a_token = with_token_advantages(draw(11, 1e-3), 12)
    far = with_token_advantages(draw(13, 0.5), 14)
    return [
        case("gspo_token default range", draw(1, 1e-3), "equal advantages: as gspo", name="gspo_token"),
        case("gspo_token token advantages", one_a_token, "both signs in one response", name="gspo_token"),
        case("gspo_token wide range", far, "ratios far from 1", name="gspo_token", **WIDE),
        case("gspo_token dual clip", draw(15, 2.0), "large ratios", name="gspo_token", dual_clip=1.5, **WIDE),
    ]


def token_ratios() -> dict[str, list[Entry]]:
    def kl(estimator: str) -> Settings:
        return {"coefficient": 0.1, "where": "reward", "estimator": estimator}

    paper = {"clip_low": 0.2, "clip_high": 0.27}
    inside = "bounded at a ratio that the range allows: not clipped"
    population = {"ddof": 0, "eps": 1e-4}
    one_a_token = with_token_advantages(draw(26, 0.3), 27)
    far = [draw(72, 0.3, reference=0.5), draw(73, 0.3, reference=0.5)]
    return {
        "grpo": [
            case("grpo default range", draw(21, 0.3), name="grpo"),
            case(
                "grpo clip 0.2 and 0.27",
                draw(22, 0.3),
                "as the baseline of GSPO's paper",
                name="grpo",
                **paper,
            ),
            case("grpo dual clip", draw(23, 1.5), "large ratios, A < 0", name="grpo", dual_clip=2.0),
            case("grpo dual clip 1.1", draw(24, 0.5), inside, name="grpo", dual_clip=1.1, clip_high=0.5),
            case("grpo token mean", draw(25, 0.3), name="grpo", aggregation="token_mean"),
            case("grpo token advantages", one_a_token, name="grpo"),
        ],
        "dr_grpo": [
            case("dr_grpo constant 8", draw(31, 0.3), "no deviation", name="dr_grpo", length_constant=8),
            case("dr_grpo constant 1", draw(32, 0.3), "sums over tokens", name="dr_grpo", length_constant=1),
        ],
        "dapo": [
            case("dapo default range", draw(41, 0.4), "clip 0.2 and 0.28, token mean", name="dapo"),
            case(
                "dapo population deviation",
                draw(42, 0.4),
                "ddof 0, eps 1e-4",
                name="dapo",
                advantage=population,
            ),
        ],
        "cispo": [
            case("cispo default bound", draw(51, 2.5), "weights cut at 5", name="cispo"),
            case(
                "cispo bound 1.2", draw(52, 1.0), "for both signs of A; no lower", name="cispo", clip_high=0.2
            ),
        ],
        "rloo": [
            case("rloo default", draw(61, 0.3), "baseline: the other responses of the group", name="rloo"),
            case("rloo on-policy", draw(62, 0.0), "REINFORCE with that baseline", name="rloo"),
        ],
        "reinforce_pp": [
            case(
                "reinforce_pp default", draw(71, 0.3), "mean and deviation of the batch", name="reinforce_pp"
            ),
            case("reinforce_pp returns k1", far[0], "KL in the reward", name="reinforce_pp", kl=kl("k1")),
            case(
                "reinforce_pp returns k3", far[1], "a return at each token", name="reinforce_pp", kl=kl("k3")
            ),
        ],
    }


def hybrid() -> list[Entry]:
    one_a_token = with_token_advantages(draw(83, 0.3), 84)
    return [
        case("hybrid a = 1", draw(1, 1e-3), "gspo_token, with its range", name="hybrid", hybrid_weight=1),
        case("hybrid a = 0", draw(21, 0.3), "grpo, with its range", name="hybrid", hybrid_weight=0),
        case("hybrid a = 0.5", draw(81, 0.3), "range between the two in the log", name="hybrid"),
        case("hybrid a = 0.9", draw(82, 0.1), name="hybrid", hybrid_weight=0.9),
        case(
            "hybrid token advantages", one_a_token, "range given", name="hybrid", clip_low=0.1, clip_high=0.2
        ),
    ]


def kl() -> list[Entry]:
    entries = [
        case(
            f"{name} {estimator} in the {where}",
            draw(90 + i, off, reference=0.7),
            name=name,
            kl={"coefficient": 0.05, "estimator": estimator, "where": where},
        )
        for i, (name, off) in enumerate((("gspo", 1e-3), ("grpo", 0.3)))
        for estimator in ("k1", "k2", "k3")
        for where in ("loss", "reward")
    ]
    far = draw(95, 0.3, reference=0.5)
    for sample, x in zip(far, (200.0, -200.0, 100.0, -21.0, 21.0, 19.0), strict=True):
        sample["ref_logprobs"] = [v + x for v in sample["train_logprobs"]]
    apart = {"mask": [1], "train_logprobs": [-100.0], "old_logprobs": [-100.0], "ref_logprobs": [0.0]}
    constant = [{"group": "a", "reward": 1.0} | apart, {"group": "a", "reward": 1.0} | apart]
    note = "policy -100, reference 0: exp(10) - 11, gradient 0"
    return [
        *entries,
        case("k3 far away", far, "clamped before exp", name="grpo", kl={"coefficient": 1e-9}),
        case("k3 clamped at 10", constant, note, name="grpo", kl={"coefficient": 1.0}, log_ratio_max=10.0),
        case("masked token has no KL", draw(96, 1e-3, reference=1.0), name="gspo", kl={"coefficient": 1.0}),
    ]


def corrections() -> list[Entry]:
    entries: list[Entry] = []
    for name, off, modes in (
        ("gspo", 1e-3, ("truncate", "mask")),
        ("grpo", 0.3, ("truncate", "mask")),
        ("gspo_token", 1e-3, ("truncate",)),
        ("cispo", 0.5, ("mask",)),
    ):
        for mode in modes:
            for level, form, apart in (
                ("token", "geometric_mean", 0.8),
                ("sequence", "geometric_mean", 0.8),
                ("sequence", "product", 0.25),
            ):
                how = {"mode": mode, "level": level, "sequence_form": form, "low": 0.7, "high": 1.3}
                title = f"{name} {mode} {level}" + (f" {form}" if level == "sequence" else "")
                samples = draw(200 + len(entries), off, rollout=apart)
                entries.append(case(title, samples, name=name, correction=how))
    both = {"kl": {"coefficient": 0.1}, "correction": {"mode": "truncate", "high": 1.1}}
    note = "the KL term is neither corrected nor multiplied by a ratio"
    far = draw(130, 1e-3, rollout=0.8, reference=0.5)
    return [*entries, case("correction leaves KL alone", far, note, name="gspo", **both)]


def masks() -> list[Entry]:
    threshold = {"off_policy_mask": {"threshold": 0.05}}
    turns = {1: [1, 0, 0, 1, 1], 4: [0, 1, 1, 0, 0, 1], 5: [1, 0, 0, 0]}
    entries = []
    for name, seed, off in (("gspo", 141, 1e-3), ("grpo", 142, 0.3), ("hybrid", 143, 0.3)):
        note = "tokens that others wrote are in no mean"
        entries.append(case(f"{name} turns", draw(seed, off, masks=turns), note, name=name))
    for name, seed, off in (("gspo", 144, 1e-3), ("dapo", 145, 0.3), ("rloo", 146, 0.3)):
        note = "it counts nowhere, nor in its group's mean"
        masked = draw(seed, off, masks={1: [0] * 5})
        entries.append(case(f"{name} sample masked in full", masked, note, name=name))
    for name, seed, off in (("gspo", 151, 1e-3), ("grpo", 148, 0.3), ("cispo", 149, 0.3)):
        note = "whole responses, decided by their mean"
        stale = draw(seed, off, rollout=0.3)
        entries.append(case(f"{name} off-policy mask", stale, note, name=name, **threshold))
    stale = draw(150, 0.3, rollout=0.3, reference=0.5)
    leash = {"kl": {"coefficient": 0.1}}
    note = "the dropped response keeps its KL term"
    return [*entries, case("off-policy mask leaves KL", stale, note, name="grpo", **leash, **threshold)]


def groups() -> list[Entry]:
    def responses(groups: Sequence[str | int], rewards: Sequence[float], seed: int) -> list[Sample]:
        return draw(
            seed, 0.2, lengths=[1 + i % 3 for i in range(len(groups))], groups=groups, rewards=rewards
        )

    uneven, rewards = [0] * 4 + [1] * 2 + [2] * 3, [1.0, 2.0, 3.0, 4.0, 10.0, 12.0, 5.0, 6.0, 7.0]
    order = [3, 8, 0, 5, 1, 7, 4, 2, 6]
    mixed = responses([uneven[i] for i in order], [rewards[i] for i in order], 162)
    alone = responses(["x", "x", "y"], [1.0, 3.0, 5.0], 163)
    constant = responses(["x"] * 15 + ["y"] * 2, [0.35] * 15 + [0.0, 1.0], 164)
    odd = responses(["x"] * 8, [0.35] * 7 + [0.0], 165)
    plain = {"scale": "none"}
    entries = [
        case("groups of 4, 2 and 3", responses(uneven, rewards, 161), "by id", name="grpo", advantage=plain),
        case("groups in any order", mixed, "by id, order kept", name="grpo", advantage=plain),
        case("a group of one", alone, "exactly 0, beside +-0.7071", name="grpo"),
        case("a constant group", constant, "15 x 0.35 gives exactly 0", name="grpo"),
        case("seven alike and one odd", odd, "leave-one-out: -0.35 for the odd one", name="rloo"),
    ]
    for baseline in ("group_mean", "leave_one_out", "batch_mean", "none"):
        for scale in ("group_std", "batch_std", "none"):
            how = {"baseline": baseline, "scale": scale}
            title = f"{baseline}, {scale}"
            entries.append(case(title, responses(uneven, rewards, 166), name="grpo", advantage=how))
    return entries


def extreme() -> list[Entry]:
    samples = draw(171, 0.0, lengths=[2, 2, 2, 2], groups=["a"] * 4, rewards=[1.0, 0.0, 1.0, 0.0])
    for sample, d in zip(samples, (200.0, 200.0, -200.0, -200.0), strict=True):
        sample["old_logprobs"] = [v - d for v in sample["train_logprobs"]]
    apart = [sample | {"rollout_logprobs": sample["train_logprobs"]} for sample in samples]
    entries = []
    for name in DEFAULTS:
        constant = {"length_constant": 4} if name == "dr_grpo" else {}
        note = "kept within 20 before exp"
        entries.append(case(f"{name} log-ratios of 200", samples, note, name=name, **constant))
    for level in ("token", "sequence"):
        how = {"mode": "mask", "level": level, "sequence_form": "product"}
        entries.append(case(f"correction of 200, {level}", apart, name="grpo", correction=how))
    return entries


def refusals() -> list[Entry]:
    plain = draw(181, 0.0, lengths=[1, 2], groups=["a", "a"], rewards=[1.0, 0.0])
    one_a_token = with_token_advantages(plain, 182)
    rows: list[tuple[str, Settings, list[Sample]]] = [
        ("gspo with the range of grpo", {"name": "gspo", "clip_low": 0.2, "clip_high": 0.27}, plain),
        ("gspo from 0.05 on", {"name": "gspo", "clip_high": 0.05}, plain),
        ("gspo_token with the range of grpo", {"name": "gspo_token", "clip_low": 0.2}, plain),
        ("gspo with token mean", {"name": "gspo", "aggregation": "token_mean"}, plain),
        ("gspo with dual clip", {"name": "gspo", "dual_clip": 3.0}, plain),
        ("gspo with token advantages", {"name": "gspo"}, one_a_token),
        ("KL without a reference", {"name": "gspo", "kl": {"coefficient": 0.1}}, plain),
        ("correction without the engine", {"name": "gspo", "correction": {"mode": "truncate"}}, plain),
        ("cispo with a lower bound", {"name": "cispo", "clip_low": 0.2}, plain),
        ("constant length without constant", {"name": "dr_grpo"}, plain),
        ("an unknown objective", {"name": "ppo"}, plain),
        ("an unknown key", {"name": "gspo", "epsilon": 3e-4}, plain),
    ]
    return [
        {"name": name, "note": "", "algorithm": algorithm, "samples": samples, "expect": {"refused": True}}
        for name, algorithm, samples in rows
    ]


def files() -> dict[str, list[Entry]]:
    """The entries of every file, by its name without .json."""
    return {
        "gspo": gspo(),
        "gspo_token": gspo_token(),
        **token_ratios(),
        "hybrid": hybrid(),
        "kl": kl(),
        "corrections": corrections(),
        "masks": masks(),
        "groups": groups(),
        "extreme": extreme(),
        "refusals": refusals(),
    }


def text(entries: Sequence[Entry]) -> str:
    """JSON with one sample and one result a line, to be read and compared by people."""
    blocks = []
    for entry in entries:
        lines = [
            f'  "{key}": {json.dumps(entry[key])},' for key in ("name", "note", "algorithm") if entry[key]
        ]
        samples = ",\n    ".join(json.dumps(sample) for sample in entry["samples"])
        expect = ",\n    ".join(f'"{key}": {json.dumps(value)}' for key, value in entry["expect"].items())
        lines += [f'  "samples": [\n    {samples}\n  ],', f'  "expect": {{\n    {expect}\n  }}']
        blocks.append("{\n" + "\n".join(lines) + "\n}")
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def main() -> None:
    destination = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, entries in files().items():
        (destination / f"{name}.json").write_text(text(entries))


if __name__ == "__main__":
    main()
