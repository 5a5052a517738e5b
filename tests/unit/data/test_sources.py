"""Problems from reasoning-gym and JSONL, and what is said when a source is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megagspo.config.sources import JsonlSource, ReasoningGymSource
from megagspo.data.sources import SOURCES, problems_of
from megagspo.errors import DataError, MissingError


def jsonl(path: Path, *lines: str | bytes) -> JsonlSource:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return JsonlSource(jsonl=str(path))


def test_reasoning_gym_problems_are_decided_by_the_seed_and_json_able() -> None:
    entry = ReasoningGymSource(reasoning_gym="chain_sum", size=5, seed=3, config={"min_terms": 2})
    problems = list(problems_of(entry))
    assert problems == list(problems_of(entry))
    assert [problem.index for problem in problems] == [0, 1, 2, 3, 4]
    assert problems != list(problems_of(entry.model_copy(update={"seed": 4})))
    for problem in problems:
        assert json.loads(json.dumps(problem.metadata)) == problem.metadata


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chainsum", {}, "nearest are chain_sum"),
        ("chain_sum", {"min_term": 2}, "min_terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses config"),
        ("chain_sum", {"seed": 2}, "seed beside config"),
    ],
)
def test_an_impossible_task_is_named_with_the_remedy(task: str, config: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(problems_of(ReasoningGymSource(reasoning_gym=task, size=2, config=config)))


def test_a_task_that_depends_on_the_hash_seed_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DataError, match="PYTHONHASHSEED=0"):
        list(problems_of(ReasoningGymSource(reasoning_gym="ransom_note", size=2)))


def test_jsonl_lines_become_problems_with_the_rest_as_metadata(tmp_path: Path) -> None:
    entry = jsonl(
        tmp_path / "a.jsonl",
        '{"prompt": "2+2?", "answer": 4, "level": "easy"}',
        "",
        '{"prompt": "日?"}',
        "",
    )
    first, second = problems_of(entry)
    assert (first.index, first.question, first.answer, first.metadata) == (0, "2+2?", "4", {"level": "easy"})
    assert (second.index, second.question, second.answer, second.metadata) == (2, "日?", None, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "not a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8.*byte 13 of the line is 0xff"),
        ("[1]", "a list where"),
        ('{"question": "x"}', "no field 'prompt', only 'question'"),
        ('{"prompt": " "}', "field 'prompt' is empty"),
        ('{"prompt": 3}', "field 'prompt' is a int, not a text"),
        ('{"prompt": "x", "answer": NaN}', "JSON has no NaN"),
        ('{"prompt": "x", "answer": [1]}', "field 'answer' is a list"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    entry = jsonl(tmp_path / "a.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(DataError, match=message) as raised:
        list(problems_of(entry))
    assert f"{entry.jsonl}:2: " in str(raised.value)


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_file_without_a_problem_is_named(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl is empty"):
        list(problems_of(jsonl(tmp_path / "a.jsonl", *lines)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.jsonl"):
        list(problems_of(JsonlSource(jsonl=str(tmp_path / "none.jsonl"))))


def test_every_source_kind_of_the_schema_is_there() -> None:
    assert set(SOURCES) == {"reasoning_gym", "jsonl"}
