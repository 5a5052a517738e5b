"""Defaults, what depends on the algorithm, and that neither torch nor megatron is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pydantic
import pytest

from megagspo.config.messages import known_keys
from megagspo.config.schema import Config, JsonlSource, ReasoningGymSource

Load = Callable[..., Config]


def test_imports_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, megagspo.config; "
        "print([name for name in ('torch', 'megatron', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_key_has_a_description() -> None:
    assert [key for key, description in known_keys(Config).items() if not description] == []


def test_two_keys_are_enough(load: Load) -> None:
    config = load()
    assert config.run_dir == Path("runs/run")
    assert config.rollout.prompts * config.rollout.responses == 512
    assert config.trainer.minibatches == 4
    assert config.sync.bucket_bytes == 67_108_864
    assert [reward.name for reward in config.reward] == ["exact"]


def test_a_configuration_cannot_be_changed(load: Load) -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        load().trainer.steps = 3


def test_a_source_is_told_by_its_key(load: Load) -> None:
    first, second = load("data.train=[{reasoning_gym: chain_sum, size: 7}, {jsonl: a/b.jsonl}]").data.train
    assert isinstance(first, ReasoningGymSource)
    assert isinstance(second, JsonlSource)
    assert (first.label, first.size, first.seed) == ("chain_sum", 7, 0)
    assert (second.label, second.prompt, second.answer, second.template) == ("b", "prompt", "answer", "none")


def test_a_named_source_goes_by_its_name(load: Load) -> None:
    assert load("data.train=[{jsonl: b.jsonl, name: sums}]").data.train[0].label == "sums"
