"""Files, `extends`, overrides, and the way back to YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config import Config, check_config, dump_config, load_config
from megagspo.config.yaml_text import dump, parse

Load = Callable[..., Config]
Write = Callable[[str, str], Path]
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "3E-4", ".3e-3", "0.0003", "+3e-4"])
def test_numbers_with_an_exponent_are_numbers(load: Load, text: str) -> None:
    assert load(f"optimizer.lr={text}").optimizer.lr == 3e-4
    assert load(text=f"optimizer: {{lr: {text}}}").optimizer.lr == 3e-4


def test_a_date_is_a_fine_name(load: Load) -> None:
    assert load("run.name=2025-01-31").run.name == "2025-01-31"


def test_extends_merges_mappings_and_replaces_lists(write: Write, minimal: str) -> None:
    write(
        "base/base.yaml",
        minimal + "trainer: {steps: 5, minibatches: 2}\nreward: [{name: math}, {name: exact}]\n",
    )
    write("middle.yaml", "extends: base/base.yaml\ntrainer: {steps: 6}\n")
    config = load_config(write("top.yaml", "extends: middle.yaml\nreward: [{name: reasoning_gym}]\n"))
    assert (config.trainer.steps, config.trainer.minibatches) == (6, 2)
    assert [reward.name for reward in config.reward] == ["reasoning_gym"]
    assert config.model.path == "models/tiny"


def test_overrides_come_last_and_the_last_one_wins(load: Load) -> None:
    config = load(
        "trainer.steps=2", "trainer={minibatches: 1}", "trainer.steps=3", text="trainer: {steps: 1}"
    )
    assert (config.trainer.steps, config.trainer.minibatches) == (3, 1)


def test_an_override_can_be_a_list_or_reach_into_one(load: Load) -> None:
    config = load("data.train=[{jsonl: a.jsonl}, {jsonl: b.jsonl}]", "data.train.1.answer=solution")
    assert [source.label for source in config.data.train] == ["a", "b"]
    assert config.data.train[1].model_dump()["answer"] == "solution"


def test_a_value_may_contain_an_equals_sign(load: Load) -> None:
    assert load("run.name=lr=1").run.name == "lr=1"


def test_a_section_with_all_its_keys_commented_out_has_its_defaults(load: Load) -> None:
    assert load(text="trainer:\n  # steps: 3\n").trainer.steps == 100


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.name=grpo", "parallel={tensor: 2, data: auto}", "optimizer.betas=[0.5, 0.999]"],
        ["algorithm={name: cispo, off_policy_mask: {threshold: 0.1}}"],
        ["algorithm={name: hybrid, hybrid_weight: 0.3, kl: {coefficient: 1e-3}}"],
        ["run={name: '3e-4', dir: 'no'}", "rollout.stop_ids=[1, 2]", "optimizer.lr=1e-30"],
        ["data.train=[{reasoning_gym: t, config: {a: [1, 2e5, .inf, 'x', 'yes', null, {b: '1e5'}]}}]"],
    ],
)
def test_what_is_dumped_loads_back_equal(load: Load, write: Write, overrides: list[str]) -> None:
    config = load(*overrides)
    assert load_config(write("dumped.yaml", dump_config(config))) == config


@pytest.mark.parametrize("value", ["3e-4", "1E5", ".5e3", "no", "null", "1.5", "", "2025-01-31", "a: b", "ä"])
def test_text_stays_text_on_the_way_through_yaml(value: str) -> None:
    assert parse(dump({"key": value}), where="here").value == {"key": value}


@pytest.mark.parametrize("name", ["tiny_moe_cpu.yaml", "tiny_moe_sft_cpu.yaml"])
def test_the_shipped_configurations_are_valid(name: str) -> None:
    config = load_config(CONFIGS / name)
    assert check_config(config) == []
    assert config.parallel.resolve().world_size == 2


def test_the_quickstart_starts_from_what_the_warm_up_writes() -> None:
    warm, main = (load_config(CONFIGS / name) for name in ("tiny_moe_sft_cpu.yaml", "tiny_moe_cpu.yaml"))
    assert warm.checkpoint.save_hf
    assert Path(main.model.path) == warm.run_dir / "hf"
    assert warm.data.eval == main.data.eval  # the same held-out problems are kept out of both
