"""Contradictions are refused, dubious combinations warned about, absent files named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config import Config, check_config, check_paths
from megagspo.errors import ConfigError, MissingError

Load = Callable[..., Config]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm={name: grpo, aggregation: token_mean}"],
        ["rollout.responses=1", "algorithm.advantage={baseline: none, scale: none}"],
        ["rollout={prompts: 2, responses: 2}"],
        ["eval.every=5", "data.eval=[{jsonl: eval.jsonl}]"],
    ],
)
def test_ordinary_configurations_pass_without_a_warning(load: Load, overrides: list[str]) -> None:
    assert check_config(load(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.clip_low=0.2"], ["algorithm.clip_low=0.2", "is refused", "remove both keys"]),
        (
            ["algorithm.overlong={buffer: 65, penalty: 1}"],
            ["algorithm.overlong.buffer=65", "rollout.response_length_max=64", "lower the buffer"],
        ),
        (["rollout.responses=1"], ["rollout.responses=1", "group_mean", "set rollout.responses=2"]),
        (["rollout.responses=1", "algorithm.advantage.baseline=none"], ["rollout.responses=1", "group_std"]),
        (
            ["rollout={prompts: 2, responses: 2}", "trainer.minibatches=5"],
            ["trainer.minibatches=5", "= 4 samples", "trainer.minibatches=4 or less"],
        ),
        (["eval.every=5"], ["eval.every=5", "data.eval is empty", "eval.every=0"]),
    ],
)
def test_contradictions_are_refused_with_a_remedy(load: Load, overrides: list[str], words: list[str]) -> None:
    config = load(*overrides)
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    for word in words:
        assert word in str(caught.value)


def test_warnings_about_the_objective_are_passed_on(load: Load) -> None:
    """All rules of the objective: test_config_guard.py."""
    (warning,) = check_config(load("algorithm={clip_high: 0.011}"))
    assert "3e-4 and 4e-4" in warning


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=absent"], ["model.path", "absent", "make demo", "tools/make_tiny_moe.py"]),
        (["model.path=."], ["model.path", "no config.json", "the hf/ of a run"]),
        (["model.checkpoint=absent"], ["model.checkpoint", "absent", "remove the key"]),
        (["model.checkpoint=."], ["model.checkpoint", ".metadata", "remove the key"]),
        (["rollout.replay=absent"], ["rollout.replay", "absent", "remove the key"]),
        (["data.train.0.jsonl=absent"], ["data.train.0.jsonl", "absent"]),
        (["data.eval=[{reasoning_gym: x}, {jsonl: absent}]"], ["data.eval.1.jsonl", "absent"]),
    ],
)
def test_absent_files_are_named(load: Load, tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "config.json").touch()
    present = [f"model.path={tmp_path}", f"data.train.0.jsonl={tmp_path / 'train.jsonl'}"]
    check_paths(load(*present))
    with pytest.raises(MissingError) as caught:
        check_paths(load(*present, *overrides))
    for word in words:
        assert word in str(caught.value)


def test_evaluation_does_not_ask_for_what_only_training_reads(load: Load, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    absent = ["data.train.0.jsonl=absent", "model.checkpoint=absent", "rollout.replay=absent"]
    config = load(f"model.path={tmp_path}", *absent)
    check_paths(config, training=False)
    with pytest.raises(MissingError, match=r"data\.eval\.0\.jsonl"):
        check_paths(load(f"model.path={tmp_path}", "data.eval=[{jsonl: absent}]"), training=False)
