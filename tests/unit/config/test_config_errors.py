"""Mistakes in files and overrides: each message names the place, the thing and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config import Config, load_config
from megagspo.errors import ConfigError, MissingError

Load = Callable[..., Config]
Write = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "trainer: {setps: 3}",
            ["config.yaml, line 2", "unknown key trainer.setps", "did you mean trainer.steps?"],
        ),
        ("trainr: {steps: 3}", ["unknown key trainr", "did you mean trainer?"]),
        ("trainer:\n  lr: 1e-3", ["line 3", "unknown key trainer.lr", "did you mean optimizer.lr?"]),
        ("sft: {zzz: 3}", ["unknown key sft.zzz", "known here are sequences"]),
        ("algorithm: {advantage: {dof: 0}}", ["algorithm.advantage.dof", "algorithm.advantage.ddof?"]),
        ("reward: [{name: exact, wieght: 2}]", ["reward.0.wieght", "reward.0.weight?"]),
        ("reward: [{weight: 2}]", ["reward.0.name is missing"]),
        ("reward: []", ["reward must be a list of 1 or more, not []"]),
        ("reward: [{name: exact}, {name: exact}]", ["reward exact is listed twice"]),
        ("reward: {name: exact}", ["reward must be a list"]),
        ("data: {train: []}", ["data.train must be a list of 1 or more"]),
        ("data: {train: [{}]}", ["data.train.0 must be a source", "reasoning_gym, jsonl"]),
        ("data: {train: [{jsonl: a, reasoning_gym: b}]}", ["exactly one of the keys reasoning_gym, jsonl"]),
        ("data: {train: [{reasoning_gym: a, sise: 3}]}", ["data.train.0.sise", "data.train.0.size?"]),
        ("data: {train: [{jsonl: a, size: 3}]}", ["unknown key data.train.0.size"]),
        ("data: {train: [{jsonl: a/x}, {jsonl: b/x}]}", ["two sources are called x", "another name"]),
        ("model: {path: null}", ["config.yaml, line 2", "model.path must be text, not null"]),
        ("run: {name: 12}", ["run.name must be text, not 12 (put it in quotes)"]),
        ("run: {name: ''}", ["run.name must not be empty"]),
        (
            "trainer: {steps: many}",
            ["config.yaml, line 2", "trainer.steps must be a whole number, not 'many'"],
        ),
        ("trainer: {steps: 1.5}", ["trainer.steps must be a whole number, not 1.5"]),
        ("trainer: {steps: true}", ["trainer.steps must be a whole number, not true"]),
        ("trainer: {steps: 0}", ["trainer.steps must be greater than or equal to 1, not 0"]),
        ("trainer: 3", ["trainer must be a mapping"]),
        ("observe: {tensorboard: 1}", ["observe.tensorboard must be true or false, not 1"]),
        ("optimizer: {lr: fast}", ["optimizer.lr must be a number, not 'fast'"]),
        ("optimizer: {lr: .nan}", ["optimizer.lr must be a finite number"]),
        ("optimizer: {betas: [0.9]}", ["optimizer.betas.1 is missing"]),
        ("optimizer: {betas: [0.9, 1.0]}", ["optimizer.betas.1 must be less than 1, not 1.0"]),
        ("algorithm: {name: ppo}", ["algorithm.name must be 'gspo', 'gspo_token'", "or 'hybrid', not 'ppo'"]),
        ("algorithm: {name: [gspo]}", ["algorithm.name must be 'gspo',", "not ['gspo']"]),
        (
            "algorithm: {name: hybrid, hybrid_weight: 2}",
            ["hybrid_weight must be less than or equal to 1, not 2"],
        ),
        ("algorithm: {name: hybrid, hybrid_weight: .nan}", ["hybrid_weight must be a finite number"]),
        ("algorithm: {dual_clip: 1}", ["algorithm.dual_clip must be greater than 1, not 1"]),
        ("algorithm: {kl: {estimator: k4}}", ["algorithm.kl.estimator must be 'k1', 'k2' or 'k3', not 'k4'"]),
        ("algorithm: {kl: {coeficient: 1}}", ["algorithm.kl.coeficient", "algorithm.kl.coefficient?"]),
        ("algorithm: {clip_low: 1}", ["algorithm.clip_low must be less than 1, not 1"]),
        ("parallel: {data: some}", ["parallel.data must be a whole number from 1 on, or auto, not 'some'"]),
        ("rollout: {temperature: 0}", ["rollout.temperature must be greater than 0, not 0"]),
        ("rollout: {top_p: 1.1}", ["rollout.top_p must be less than or equal to 1, not 1.1"]),
        ("rollout: {top_k: 0}", ["rollout.top_k", "-1 (no limit) or at least 1, not 0"]),
        ("rollout: {engine: sglang}", ["rollout.engine must be 'embedded', not 'sglang'"]),
        ("run: {seed: 1, seed: 2}", ["config.yaml, line 2", "run.seed is given twice, first on line 2"]),
        ("trainer:\n  steps: 1\n  steps: 2", ["line 4", "trainer.steps is given twice, first on line 3"]),
        ("run: [", ["config.yaml, line", "not valid YAML"]),
        ("run: !!python/object:os.system {}", ["config.yaml, line 2", "not valid YAML"]),
        ("run: &a {name: *a}", ["not valid YAML"]),
        ("run: {extends: x}", ["unknown key run.extends"]),
    ],
)
def test_a_mistake_in_a_file_is_named(load: Load, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text=text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.setps=3", ["override 'trainer.setps=3'", "unknown key trainer.setps", "trainer.steps?"]),
        ("trainer.steps=many", ["override 'trainer.steps=many'", "must be a whole number, not 'many'"]),
        (
            "trainer={steps: many}",
            ["override 'trainer={steps: many}'", "trainer.steps must be a whole number"],
        ),
        ("trainer.steps.x=3", ["trainer.steps must be a whole number"]),
        ("data.train.1.jsonl=a", ["1 is not a position in the list (1 entries"]),
        ("data.train.first.jsonl=a", ["first is not a position in the list"]),
        ("trainer.steps", ["override 'trainer.steps'", "write section.key=value"]),
        ("=3", ["write section.key=value"]),
        ("trainer..steps=3", ["write section.key=value"]),
        ("trainer.steps=[1", ["override 'trainer.steps=[1'", "not valid YAML"]),
        ("trainer={steps: 1, steps: 2}", ["steps is given twice"]),
        ("model=", ["model.path is missing: set it (Hugging Face directory"]),
    ],
)
def test_a_mistake_in_an_override_is_named(load: Load, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    for word in words:
        assert word in str(caught.value)


def test_all_mistakes_are_listed_one_a_line(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("trainer.steps=0", text="optimizer: {lr: -1}\nrun: {nam: x}")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert sum("config.yaml, line" in line for line in lines) == 2
    assert sum("override 'trainer.steps=0'" in line for line in lines) == 1


def test_a_mistake_is_placed_in_the_file_that_made_it(write: Write, minimal: str) -> None:
    write("base.yaml", minimal + "trainer: {steps: 0}\n")
    with pytest.raises(ConfigError, match=r"base\.yaml, line 4: trainer\.steps"):
        load_config(write("top.yaml", "extends: base.yaml\ntrainer: {minibatches: 2}\n"))


def test_an_empty_file_misses_what_is_required(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("empty.yaml", ""))
    assert "empty.yaml: model.path is missing" in str(caught.value)
    assert "empty.yaml: data.train is missing" in str(caught.value)


def test_extending_in_a_circle_is_refused(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    with pytest.raises(ConfigError, match=r"circle.*b\.yaml -> .*a\.yaml -> .*b\.yaml"):
        load_config(write("b.yaml", "extends: a.yaml\n"))


@pytest.mark.parametrize("extends", ["[a.yaml]", "3"])
def test_extends_takes_one_name(write: Write, extends: str) -> None:
    with pytest.raises(ConfigError, match=r"line 1: extends must be the name of one file"):
        load_config(write("config.yaml", f"extends: {extends}\n"))


def test_a_file_that_is_not_there_is_missing(write: Write, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no configuration file .*absent\.yaml: check the name"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(MissingError, match=r"absent\.yaml, which .*top\.yaml extends"):
        load_config(write("top.yaml", "extends: absent.yaml\n"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- a\n- b\n", b"text\n", b"a: \x01\n"])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        load_config(path)


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path)
