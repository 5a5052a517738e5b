"""Saved rollouts come back as they were, and a broken file says where it is broken."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megagspo.errors import DataError, MissingError, NumericsError
from megagspo.rollout.store import check_finite, read_samples, write_samples
from megagspo.types import Completion, Prompt, Sample


def samples(count: int = 3) -> list[Sample]:
    rng = random.Random(0)
    prompt = Prompt(
        id="sums/1",
        source="sums",
        text="1 + 1 = 😀\u2028\n",
        token_ids=(1, 2),
        metadata=MappingProxyType({"level": [1, {"a": None}]}),
    )
    return [
        Sample(
            id=f"2/0/sums/1#{i}",
            group="2/0/sums/1",
            prompt=prompt,
            completion=Completion(
                request_id=f"2/0/sums/1#{i}",
                token_ids=tuple(range(i * 5)),
                logprobs=tuple(-rng.expovariate(1) * 10 ** rng.randint(-300, 3) for _ in range(i * 5)),
                finish_reason=("abort", "stop", "length")[i % 3],
                version_min=1,
                version_max=2,
            ),
            text="answer\r\n",
            reward=0.1 + 0.2,
            rewards={"exact": 1 / 3},
        )
        for i in range(count)
    ]


def test_samples_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000002.jsonl"
    write_samples(path, samples(), step=2, version=1)
    assert read_samples(path) == samples()
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == len(samples()) + 1
    assert {(json.loads(line)["step"], json.loads(line)["version"]) for line in lines[:-1]} == {(2, 1)}


def strict(text: str) -> Any:
    """JSON as everyone else reads it: Python's own parser takes NaN."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def not_finite(*, reward: float = 0.0, logprob: float = -1.0) -> Sample:
    whole = samples()[1]
    completion = Completion(**{**vars(whole.completion), "logprobs": (-1.0, logprob, -1.0, -1.0, -1.0)})
    return Sample(**{**vars(whole), "reward": reward, "completion": completion})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_a_number_stays_visible_in_valid_json_and_stops_the_step(tmp_path: Path, value: float) -> None:
    path = tmp_path / "a.jsonl"
    for broken in (not_finite(reward=value), not_finite(logprob=value)):
        write_samples(path, [samples()[0], broken], step=0, version=0)
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            strict(line)
        found = read_samples(path)[1]
        assert repr((found.reward, found.completion.logprobs)) == repr(
            (broken.reward, broken.completion.logprobs)
        )
        with pytest.raises(NumericsError, match=rf"sample {broken.id}: .* is {value}") as caught:
            check_finite([samples()[0], broken])
        assert caught.value.sample == broken.id
    check_finite(samples())


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    """A step that replayed it would make new rollouts without a word."""
    (tmp_path / "step.jsonl").touch()
    with pytest.raises(DataError, match=r"step\.jsonl holds no samples"):
        read_samples(tmp_path / "step.jsonl")


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.jsonl", samples(), step=0, version=0)
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(DataError, match=r"a\.jsonl:4: .*utf-8"):
        read_samples(tmp_path / "a.jsonl")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    write_samples(path, samples(), step=2, version=1)

    def dying() -> Any:
        yield samples()[0]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_samples(path, dying(), step=2, version=1)
    assert read_samples(path) == samples()
    assert [p.name for p in tmp_path.iterdir()] == ["step.jsonl"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda line: line[: len(line) // 2], "not a JSON object"),
        (lambda line: "[1]", "not a saved sample"),
        (lambda line: line.replace('"reward":', '"rewarded":'), "reward"),
        (lambda line: line.replace('"token_ids": [0, ', '"token_ids": ['), "log-probabilities"),
        (lambda line: line.replace('"finish_reason": "stop"', '"finish_reason": "tired"'), "finish_reason"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, damage: Any, complaint: str) -> None:
    path = tmp_path / "step.jsonl"
    write_samples(path, samples(), step=2, version=1)
    lines = path.read_text().split("\n")
    lines[1] = damage(lines[1])
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"step\.jsonl:2: .*{complaint}"):
        read_samples(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"step\.jsonl is not there"):
        read_samples(tmp_path / "step.jsonl")
