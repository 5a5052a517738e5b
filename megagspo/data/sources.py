"""Where problems come from: one function a source kind, and a registry of them.

A source yields `Problem`s in a fixed order. It knows nothing of tokenizers or templates; `prompts.py` makes
prompts of what it yields.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagspo.config.sources import JsonlSource, ReasoningGymSource, Source
from megagspo.errors import DataError, MissingError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question as its source gives it. answer is None where the source has none; metadata is JSON-able."""

    index: int
    question: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


# Tasks whose problems depend on the order of Python sets, hence on the hash seed and not on their own alone.
# Found by generating every task of reasoning-gym 0.1.25 under two hash seeds.
HASH_SEEDED_TASKS = frozenset(
    {"isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"}
)


def reasoning_gym_problems(entry: ReasoningGymSource) -> Iterator[Problem]:
    """Problems of one reasoning-gym task. Their metadata is what the task's own scorer needs.

    Raises DataError for an unknown task, for settings that the task refuses, and for a task whose problems
    would differ from process to process.
    """
    # Imported late: it takes two seconds, and a run on JSONL files does without.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, settings = entry.reasoning_gym, dict(entry.config)
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.0)
        raise DataError(
            f"source {entry.label!r}: reasoning-gym has no task {task!r}: write another, the nearest are "
            f"{', '.join(near)}"
        )
    if task in HASH_SEEDED_TASKS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise DataError(
            f"the problems of reasoning-gym task {task!r} depend on Python's hash seed: other ranks and a "
            "resumed run would see other problems. Start with PYTHONHASHSEED=0 in the environment"
        )
    if taken := settings.keys() & {"size", "seed"}:
        misplaced = ", ".join(sorted(taken))
        raise DataError(f"source {entry.label!r}: write {misplaced} beside config, not inside it")
    try:
        dataset = reasoning_gym.create_dataset(task, size=entry.size, seed=entry.seed, **settings)
        made = [dataset[index] for index in range(entry.size)]
    # Tasks check their settings by assert and by all kinds of exceptions, some of them only while generating.
    except Exception as error:
        known = sorted(set(DATASETS[task][1].__dataclass_fields__) - {"size", "seed"})
        raise DataError(
            f"reasoning-gym task {task!r} refuses config {settings}: {error or type(error).__name__}. "
            f"Its settings are {', '.join(known)}"
        ) from error
    for index, problem in enumerate(made):
        question = problem["question"]
        # As JSON gives it back: a prompt read from a saved rollout is then scored as it was the first time.
        metadata = json.loads(json.dumps(problem["metadata"], default=str))
        scoring = {"task": task, "config": settings, "question": question, "metadata": metadata}
        yield Problem(
            index=index,
            question=question,
            answer=problem["answer"],
            metadata={"reasoning_gym": scoring},
        )


def jsonl_problems(entry: JsonlSource) -> Iterator[Problem]:
    """Problems from a file with one JSON object a line. Blank lines are skipped; indices count lines from 0.

    Fields other than prompt and answer become metadata. A number as an answer is taken as its text; a line
    without the answer field is a problem without an answer. Raises DataError naming file and line.
    """
    path = Path(entry.jsonl)
    if not path.is_file():
        raise MissingError(f"source {entry.label!r}: no file {path}; relative paths start at {Path.cwd()}")
    empty = True
    with path.open("rb") as file:  # bytes, so that a line that is not UTF-8 is named by its number
        for index, raw in enumerate(file):
            if raw.strip():
                empty = False
                yield _jsonl_problem(entry, raw, index, f"{path}:{index + 1}")
    if empty:
        raise DataError(f"{path} is empty: write one JSON object a line, or take it out of the configuration")


def _jsonl_problem(entry: JsonlSource, raw: bytes, index: int, place: str) -> Problem:
    try:
        line = json.loads(raw.decode("utf-8").strip(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 (byte {error.start + 1} of the line is {raw[error.start]:#x}); mend or "
            "remove the line, or save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not a JSON object ({error.msg}, column {error.colno}); mend or remove the line"
        ) from error
    except ValueError as error:
        raise DataError(f"{place}: not a JSON object ({error}); mend or remove the line") from error
    if not isinstance(line, dict):
        raise DataError(f"{place}: a {type(line).__name__} where a JSON object is expected; mend the line")
    if entry.prompt not in line:
        raise DataError(
            f"{place}: no field {entry.prompt!r}, only {', '.join(map(repr, line)) or 'none at all'}; "
            "set the source's `prompt` to the field that holds the prompt"
        )
    question, answer = line.pop(entry.prompt), line.pop(entry.answer, None)
    if not isinstance(question, str):
        kind = type(question).__name__
        raise DataError(f"{place}: field {entry.prompt!r} is a {kind}, not a text; mend or remove the line")
    if not question.strip():
        raise DataError(f"{place}: field {entry.prompt!r} is empty; mend or remove the line")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        kind = type(answer).__name__
        raise DataError(f"{place}: field {entry.answer!r} is a {kind}; write a text or a number")
    return Problem(
        index=index, question=question, answer=None if answer is None else str(answer), metadata=line
    )


def _refuse_constant(name: str) -> Any:
    """Python's parser takes NaN and Infinity, which JSON has not and no other reader takes."""
    raise ValueError(f"JSON has no {name}")


SOURCES: dict[str, Callable[..., Iterator[Problem]]] = {
    "reasoning_gym": reasoning_gym_problems,
    "jsonl": jsonl_problems,
}
"""Source kinds by the key that tells an entry of the configuration apart."""


def problems_of(entry: Source) -> Iterator[Problem]:
    """The problems of one entry of `data.train` or `data.eval`."""
    kind = next(kind for kind in SOURCES if hasattr(entry, kind))  # the schema lets no other entry through
    return SOURCES[kind](entry)
