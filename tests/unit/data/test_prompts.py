"""Held-out and training prompts are disjoint, and no prompt is cut or lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megagspo.config.sources import DataConfig, JsonlSource, ReasoningGymSource
from megagspo.data import load_prompts
from megagspo.errors import DataError


def jsonl(path: Path, *questions: str) -> JsonlSource:
    path.write_text("\n".join(json.dumps({"prompt": question, "answer": "1"}) for question in questions))
    return JsonlSource(jsonl=str(path))


def test_held_out_questions_and_repeated_ones_are_not_trained_on(tmp_path: Path, tiny_tokenizer: Any) -> None:
    train = jsonl(tmp_path / "train.jsonl", "a", "b", "a", "c", "b ", "d")
    held_out = jsonl(tmp_path / "eval.jsonl", "c", "e", "e")
    prompts = load_prompts(DataConfig(train=(train,), eval=(held_out,)), tiny_tokenizer)
    assert [prompt.text for prompt in prompts.train] == ["a\n", "b\n", "d\n"]
    assert [prompt.id for prompt in prompts.train] == ["train/0", "train/1", "train/5"]
    assert [prompt.id for prompt in prompts.held_out] == ["held_out/eval/0", "held_out/eval/1"]
    assert (prompts.dropped, prompts.held_out_dropped) == (3, 1)


def test_one_task_may_train_and_evaluate_without_sharing_ids_or_questions(tiny_tokenizer: Any) -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = (
        ReasoningGymSource(reasoning_gym="chain_sum", size=100, seed=seed, config=small) for seed in (0, 1)
    )
    prompts = load_prompts(DataConfig(train=(train,), eval=(held_out,)), tiny_tokenizer)
    assert prompts.dropped > 0
    assert len(prompts.train) + prompts.dropped == 100
    assert not {prompt.text for prompt in prompts.train} & {prompt.text for prompt in prompts.held_out}
    assert not {prompt.id for prompt in prompts.train} & {prompt.id for prompt in prompts.held_out}


def test_training_data_that_is_all_held_out_is_a_users_mistake(tiny_tokenizer: Any) -> None:
    source = ReasoningGymSource(reasoning_gym="chain_sum", size=5)
    with pytest.raises(DataError, match="another seed or file"):
        load_prompts(DataConfig(train=(source,), eval=(source,)), tiny_tokenizer)


def test_a_prompt_too_long_is_named_with_its_length(tmp_path: Path, tiny_tokenizer: Any) -> None:
    train = jsonl(tmp_path / "train.jsonl", "12", "1234567")
    data = DataConfig(train=(train,), prompt_length_max=5)
    with pytest.raises(
        DataError, match=r"train/1 \(.*train\.jsonl:2\) has 8 tokens, more than data\.prompt_length_max=5"
    ):
        load_prompts(data, tiny_tokenizer)
