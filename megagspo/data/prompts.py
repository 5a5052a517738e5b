"""The prompts of a run: held-out ones first, then training ones that are none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megagspo.config.sources import DataConfig, JsonlSource, Source
from megagspo.data.sources import problems_of
from megagspo.data.templates import PromptTokenizer, encode, render
from megagspo.errors import DataError
from megagspo.types import Prompt

HELD_OUT = "held_out"


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """What a run trains on and what it is measured by. No question is in both, and none is in either twice.

    dropped: training problems left out because their question is held out or came before; held_out_dropped:
    held-out problems left out because their question came before.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    dropped: int
    held_out_dropped: int


def load_prompts(data: DataConfig, tokenizer: PromptTokenizer) -> PromptSet:
    """Builds the prompts of the configuration's `data` section.

    Ids are `<source>/<index>` for training and `held_out/<source>/<index>` for evaluation, so that one task
    may serve both. Raises DataError for a broken source, for a prompt longer than `data.prompt_length_max`,
    and when nothing is left to train on.
    """
    seen: set[str] = set()
    held_out, held_out_dropped = _build(data.eval, seen, data, tokenizer, id_prefix=f"{HELD_OUT}/")
    train, dropped = _build(data.train, seen, data, tokenizer, id_prefix="")
    if not train:
        raise DataError(
            f"nothing to train on: data.train gives no problems, or all of its {dropped} are held out. "
            "Give the sources of data.train another seed or file than those of data.eval"
        )
    return PromptSet(train=train, held_out=held_out, dropped=dropped, held_out_dropped=held_out_dropped)


def load_held_out(data: DataConfig, tokenizer: PromptTokenizer) -> PromptSet:
    """The held-out prompts that `load_prompts` gives, alone: sources of data.train are not even read."""
    held_out, dropped = _build(data.eval, set(), data, tokenizer, id_prefix=f"{HELD_OUT}/")
    return PromptSet(train=[], held_out=held_out, dropped=0, held_out_dropped=dropped)


def _build(
    entries: Sequence[Source], seen: set[str], data: DataConfig, tokenizer: PromptTokenizer, *, id_prefix: str
) -> tuple[list[Prompt], int]:
    """Prompts of the entries whose question is not in `seen`, which grows; and how many were left out."""
    prompts: list[Prompt] = []
    dropped = 0
    for entry in entries:
        for prompt, question in _prompts_of(entry, tokenizer, id_prefix):
            if question in seen:
                dropped += 1
                continue
            seen.add(question)
            _check_length(prompt, entry, data.prompt_length_max)
            prompts.append(prompt)
    return prompts, dropped


def _prompts_of(entry: Source, tokenizer: PromptTokenizer, id_prefix: str) -> Iterator[tuple[Prompt, str]]:
    for problem in problems_of(entry):
        text = render(problem.question, template=entry.template, tokenizer=tokenizer)
        prompt = Prompt(
            id=f"{id_prefix}{entry.label}/{problem.index}",
            source=entry.label,
            text=text,
            token_ids=encode(text, tokenizer=tokenizer),
            answer=problem.answer,
            metadata=problem.metadata,
        )
        # Compared without the white space around it: a line break more does not make another problem.
        yield prompt, problem.question.strip()


def _check_length(prompt: Prompt, entry: Source, longest: int) -> None:
    if len(prompt.token_ids) > longest:
        index = int(prompt.id.rpartition("/")[2])
        place = f" ({entry.jsonl}:{index + 1})" if isinstance(entry, JsonlSource) else ""
        raise DataError(
            f"prompt {prompt.id}{place} has {len(prompt.token_ids)} tokens, more than "
            f"data.prompt_length_max={longest}: "
            f"raise it, or take the problem out of source {prompt.source!r}"
        )
