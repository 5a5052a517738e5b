"""The vectors of this folder: written by the generator, right by a second way, and met by the package."""

from __future__ import annotations

import ast
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megagspo.conformance.comparison import run_vectors
from megagspo.conformance.vectors import Vector, read_vectors
from tests.conformance import generate, papers

HERE = Path(__file__).resolve().parent
FILES = generate.files()
ENTRIES = [pytest.param(entry, id=entry["name"]) for entries in FILES.values() for entry in entries]
RESULTS = [
    pytest.param(entry, id=entry["name"])
    for name, entries in FILES.items()
    for entry in entries
    if name != "refusals"
]


def close(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of numbers: exp may be rounded otherwise on another machine."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15)
    return bool(a == b)


def test_the_generator_writes_the_committed_files() -> None:
    assert {file.stem for file in HERE.glob("*.json")} == set(FILES)
    for name, entries in FILES.items():
        committed = json.loads((HERE / f"{name}.json").read_text())
        written = json.loads(generate.text(entries))
        assert [entry["name"] for entry in committed] == [entry["name"] for entry in written]
        for one, other in zip(committed, written, strict=True):
            assert close(one, other), f"{name}.json, {one['name']}: run python tests/conformance/generate.py"


@pytest.mark.parametrize("file", ["papers.py", "generate.py"])
def test_the_references_use_nothing_of_megagspo(file: str) -> None:
    for node in ast.walk(ast.parse((HERE / file).read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in names if name.split(".")[0] in ("megagspo", "torch")]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_package_agrees_with_every_vector(entry: dict[str, Any]) -> None:
    (result,) = run_vectors([Vector.model_validate(entry)])
    assert result.wrong == []


@pytest.mark.parametrize("entry", RESULTS)
def test_gradients_in_closed_form_are_central_differences(entry: dict[str, Any]) -> None:
    """Of the transcription's own loss. Where a part of it is detached, of one that holds this part still:
    sg[mean d] + l - sg[l] is a token ratio against old = l - exponent, and CISPO's loss is linear in l."""
    algorithm, samples = entry["algorithm"], copy.deepcopy(entry["samples"])
    gradients = entry["expect"]["gradients"]
    s = papers.settings(algorithm)
    if s["name"] == "cispo":
        with_kl = "kl" in algorithm
        linear = sum(
            g * v
            for row, sample in zip(gradients, samples, strict=True)
            for g, v in zip(row, sample["train_logprobs"], strict=True)
        )
        assert not with_kl
        assert linear == pytest.approx(entry["expect"]["loss"], rel=1e-12, abs=1e-12)
        return
    if s["name"] in ("gspo_token", "hybrid"):
        algorithm, samples = as_token_ratios(algorithm, samples, s)
    held = papers.evaluate(entry["algorithm"], entry["samples"])["advantages"]
    for i, sample in enumerate(samples):
        sample["token_advantages"] = held[i]  # they may depend on what is moved: a constant of the loss
        for t, masked in enumerate(sample["mask"]):
            if masked:
                continue
            assert gradients[i][t] == 0
    h = 1e-6
    for i, sample in enumerate(samples):
        for t in range(len(sample["mask"])):
            ends = []
            for step in (h, -h):
                moved = copy.deepcopy(samples)
                moved[i]["train_logprobs"][t] += step
                ends.append(papers.evaluate(algorithm, moved)["loss"])
            # The differences are exact to h^2 times the third derivative, of the order of the loss, and to
            # the loss's last digits over h.
            size = max(1.0, abs(entry["expect"]["loss"]))
            assert gradients[i][t] == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-8 * size, rel=1e-8)


def as_token_ratios(
    algorithm: dict[str, Any], samples: list[dict[str, Any]], s: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    shifted = []
    for sample in samples:
        row = papers.learned(sample)
        d = [n - o for n, o in zip(row["train_logprobs"], row["old_logprobs"], strict=True)]
        mean = math.fsum(d) / len(d) if d else 0.0
        all_d = [n - o for n, o in zip(sample["train_logprobs"], sample["old_logprobs"], strict=True)]
        exponents = [s["a"] * mean + (1 - s["a"]) * one for one in all_d]
        moved = sample | {
            "old_logprobs": [n - e for n, e in zip(sample["train_logprobs"], exponents, strict=True)]
        }
        if "rollout_logprobs" in sample:  # the correction is taken from the same two as before
            moved["rollout_logprobs"] = [
                r + new - old
                for r, new, old in zip(
                    sample["rollout_logprobs"], moved["old_logprobs"], sample["old_logprobs"], strict=True
                )
            ]
        shifted.append(moved)
    token = {key: value for key, value in algorithm.items() if key != "hybrid_weight"}
    return token | {"name": "grpo", "clip_low": 1 - s["low"], "clip_high": s["high"] - 1}, shifted


@pytest.mark.parametrize("name", [name for name in papers.DEFAULTS if name != "cispo"])
def test_every_objective_is_clipped_on_both_sides_and_not_at_all(name: str) -> None:
    """Or a mistake in a corner of the surrogate would pass unseen: above the range A > 0 is clipped, below it
    A < 0, and in between neither."""
    sides = set()
    for entry in FILES[name]:
        expect = entry["expect"]
        for sample, advantage, clipped in zip(
            entry["samples"], expect["advantages"], expect["clipped"], strict=True
        ):
            own = advantage if isinstance(advantage, list) else [advantage] * len(clipped)
            for one, side, masked in zip(own, clipped, sample["mask"], strict=True):
                if masked and one:
                    sides.add((side, one > 0))
    assert sides == {(True, True), (True, False), (False, True), (False, False)}


def test_options_bite_in_their_vectors() -> None:
    """Masked and truncated weights, dropped and kept responses all occur."""
    cut, dropped = set(), set()
    for entry in FILES["corrections"] + FILES["masks"]:
        s = papers.settings(entry["algorithm"])
        for sample in entry["samples"]:
            row = papers.learned(sample)
            if s["correction"]["mode"] != "none":
                free = papers.corrections(s["correction"] | {"low": 0.0, "high": math.inf}, row, s["most"])
                kept = papers.corrections(s["correction"], row, s["most"])
                cut |= {(entry["name"], a != b) for a, b in zip(free, kept, strict=True)}
        if s["threshold"] < math.inf:
            rows = [papers.learned(sample) for sample in entry["samples"]]
            for row, own in zip(rows, papers.all_advantages(s, rows), strict=True):
                dropped.add((entry["name"], papers.keep(s, row, own), own[0] < 0))
    corrected = {name for name, _ in cut}
    assert cut == {(name, bite) for name in corrected for bite in (True, False)}
    masking = {name for name, _, _ in dropped}
    assert {(name, 0.0, True) for name in masking} <= dropped
    assert {(name, 1.0, True) for name in masking} & dropped


@pytest.mark.parametrize("field", ["loss", "advantages", "gradients", "clipped", "refused"])
def test_a_wrong_result_is_noticed(field: str) -> None:
    entry = copy.deepcopy(FILES["gspo"][0])
    expect = entry["expect"]
    if field == "refused":
        entry["expect"] = {"refused": True}
    elif field == "loss":
        expect["loss"] *= 1 + 1e-8
    elif field == "advantages":
        expect["advantages"][2] *= 1 + 1e-8
    elif field == "gradients":
        place = next(i for i, row in enumerate(expect["gradients"]) if row[0])
        expect["gradients"][place][0] *= 1 + 1e-8
    else:
        expect["clipped"][1][2] ^= True
    (result,) = run_vectors([Vector.model_validate(entry)])
    assert result.wrong
    assert all(line.startswith("accepted" if field == "refused" else field) for line in result.wrong)


def test_advantages_are_compared_at_tokens_however_they_are_written() -> None:
    """One number a sample, or one a token; what stands at masked tokens does not matter."""
    entry = copy.deepcopy(next(e for e in FILES["masks"] if e["name"] == "gspo sample masked in full"))
    spread = [
        [value if m else 0.0 for m in sample["mask"]]
        for value, sample in zip(entry["expect"]["advantages"], entry["samples"], strict=True)
    ]
    entry["expect"] = {"advantages": spread}
    (result,) = run_vectors([Vector.model_validate(entry)])
    assert result.wrong == []
    entry["expect"] = {"advantages": spread[:-1]}
    (result,) = run_vectors([Vector.model_validate(entry)])
    assert result.wrong == ["advantages: expected 5 entries, got 6"]


def test_the_folder_is_read_as_one() -> None:
    assert len(read_vectors(HERE)) == sum(map(len, FILES.values()))
