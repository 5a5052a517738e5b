"""Mistakes as users make them: what is typed, what is prepared before, and the words that the one message
must hold, which are the thing, the place and the remedy. `test_errors.py` makes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

CONFIG, WARM_UP = "configs/tiny_moe_cpu.yaml", "configs/tiny_moe_sft_cpu.yaml"
# {model}, {runs} and {tmp} stand for directories; {runs}/finished holds a run of two steps by `train`.
BASE = (
    *("model.path={model}", "run.dir={runs}", "run.name=finished", "trainer.steps=3", "checkpoint.every=1"),
    *("rollout.prompts=2", "rollout.responses=2", "trainer.minibatches=2", "parallel.expert=1"),
    *("data.train.0.size=40", "data.eval.0.size=10"),
)
JSONL = "data.train=[{jsonl: {tmp}/data.jsonl}]"


def train(*words: str, config: str = CONFIG) -> list[str]:
    return ["train", config, *BASE, *words]


def sft(*words: str) -> list[str]:
    base = [word for word in BASE if not word.startswith("data.train")]
    return ["sft", WARM_UP, *base, "sft.sequences=4", JSONL, *words]


def data(*lines: str | bytes) -> Callable[[Path, Path], None]:
    """Writes data.jsonl."""

    def prepare(tmp: Path, model: Path) -> None:
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        (tmp / "data.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))

    return prepare


def file(name: str, text: str = "") -> Callable[[Path, Path], None]:
    def prepare(tmp: Path, model: Path) -> None:
        (tmp / name).write_text(text)

    return prepare


def model_with(**changes: object) -> Callable[[Path, Path], None]:
    """A copy of the model at {tmp}/model, without weights, with other values in its config.json."""

    def prepare(tmp: Path, model: Path) -> None:
        shutil.copytree(model, tmp / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        (tmp / "model" / "config.json").write_text(json.dumps(config | changes))

    return prepare


def model_without_tokenizer(tmp: Path, model: Path) -> None:
    (tmp / "model").mkdir()
    shutil.copy(model / "config.json", tmp / "model")


def rollouts_of_step_3_missing(tmp: Path, model: Path) -> None:
    for step in (1, 2, 4):
        (tmp / f"step_{step:06d}.jsonl").touch()


FINE = '{"prompt": "1 + 1 =", "answer": "2"}'
# what is typed -> words that the one message must hold, what is prepared before
MISTAKES: dict[str, tuple[list[str], list[str], Callable[[Path, Path], None] | None]] = {
    # the configuration
    "unknown key": (train("trainer.step=1"), ["trainer.step=1", "did you mean trainer.steps?"], None),
    "bad type": (train("trainer.steps=many"), ["trainer.steps must be a whole number", "'many'"], None),
    "missing config": (
        train(config="{tmp}/absent.yaml"),
        ["no configuration file {tmp}/absent.yaml", "check the name"],
        None,
    ),
    "YAML": (
        train(config="{tmp}/broken.yaml"),
        ["{tmp}/broken.yaml, line 3", "not valid YAML", "from line 2 on", "mend it there"],
        file("broken.yaml", "trainer:\n  steps: [1\n"),
    ),
    "extends": (
        train(config="{tmp}/top.yaml"),
        ["{tmp}/base.yaml", "{tmp}/top.yaml extends", "check the name"],
        file("top.yaml", "extends: base.yaml\n"),
    ),
    "override": (train("trainer.steps"), ["override 'trainer.steps'", "section.key=value"], None),
    "reward": (train("reward=[{name: magic}]"), ["reward.0.name", "'magic'", "'exact', 'math' or"], None),
    "gspo with the clip range of grpo": (
        train("algorithm.clip_high=0.2"),
        ["clip_high=0.2", "4e-4", "allow_wide_clip=true"],
        None,
    ),
    "a single response": (
        train("rollout.responses=1"),
        ["rollout.responses=1", "set rollout.responses=2"],
        None,
    ),
    "more mini-batches than samples": (
        train("trainer.minibatches=9"),
        ["trainer.minibatches=9", "4 samples", "trainer.minibatches=4 or less"],
        None,
    ),
    # the model and how it is divided
    "no model": (train("model.path=/nowhere/model"), ["model.path", "/nowhere/model", "make demo"], None),
    "no Hugging Face directory": (
        train("model.path={tmp}"),
        ["model.path: {tmp}", "no config.json", "the hf/ of a run"],
        None,
    ),
    "no checkpoint": (
        train("model.checkpoint=/nowhere/checkpoint"),
        ["model.checkpoint: there is no directory /nowhere/checkpoint", "remove the key"],
        None,
    ),
    "a checkpoint that is none": (
        train("model.checkpoint={tmp}"),
        ["model.checkpoint: {tmp}", ".metadata", "remove the key"],
        None,
    ),
    "heads": (train("parallel.tensor=3"), ["parallel.tensor=3", "4 attention heads", "[1, 2, 4]"], None),
    "experts": (train("parallel.expert=3"), ["parallel.expert=3", "8 experts", "[1, 2, 4, 8]"], None),
    "layers": (train("parallel.pipeline=3"), ["parallel.pipeline=3", "4 layers", "[1, 2, 4]"], None),
    "ranks": (
        train("parallel.expert=2", "parallel.data=1"),
        ["parallel.expert=2", "parallel.data=2", "start a multiple of 2 ranks"],
        None,
    ),
    "no sequence parallel": (
        train("parallel.tensor=2", "parallel.sequence=false"),
        ["parallel.sequence=false", "remove parallel.sequence"],
        None,
    ),
    "tokenizer larger than the vocabulary": (
        train("model.path={tmp}/model"),
        ["{tmp}/model", "512 tokens", "vocab_size=300", "restore the files"],
        model_with(vocab_size=300),
    ),
    "no tokenizer": (
        train("model.path={tmp}/model"),
        ["{tmp}/model holds no tokenizer", "copy the model's tokenizer files"],
        model_without_tokenizer,
    ),
    "unsupported family": (
        train("model.path={tmp}/model"),
        ["{tmp}/model/config.json", "'mamba'", "supported: qwen3, qwen3_moe"],
        model_with(model_type="mamba"),
    ),
    # the data
    "no file": (train(JSONL), ["data.train.0.jsonl", "{tmp}/data.jsonl", "give a file"], None),
    "broken line": (
        train(JSONL),
        ["{tmp}/data.jsonl:2", "delimiter, column 36", "mend"],
        data(FINE, FINE[:-1]),
    ),
    "NaN": (train(JSONL), ["{tmp}/data.jsonl:2", "NaN", "mend"], data(FINE, FINE.replace('"2"', "NaN"))),
    "missing field": (
        train(JSONL),
        ["{tmp}/data.jsonl:1", "no field 'prompt', only 'question'", "set the source's `prompt`"],
        data('{"question": "1 + 1 ="}'),
    ),
    "not UTF-8": (
        train(JSONL),
        ["{tmp}/data.jsonl:2", "byte 13", "0xff", "mend or remove the line"],
        data(FINE, b'{"prompt": "\xff"}'),
    ),
    "empty file": (train(JSONL), ["{tmp}/data.jsonl is empty", "one JSON object a line"], data()),
    "empty prompt": (
        train(JSONL),
        ["{tmp}/data.jsonl:2", "field 'prompt' is empty", "mend or remove the line"],
        data(FINE, '{"prompt": " ", "answer": "2"}'),
    ),
    "prompt without an answer": (
        train(JSONL),
        ["prompt data/1", "no reference answer", "reward 'exact'", "answer field"],
        data(FINE, '{"prompt": "1 + 2 ="}'),
    ),
    "nothing to imitate": (
        sft("run.name=other"),
        ["prompt data/0", "no reference answer", "leave it out of data.train"],
        data('{"prompt": "1 + 2 ="}'),
    ),
    "prompt over the limit": (
        train("data.prompt_length_max=3"),
        ["prompt held_out/basic_arithmetic/0", "data.prompt_length_max=3", "raise it"],
        None,
    ),
    "line over the limit": (
        train(JSONL, "data.eval=[]", "data.prompt_length_max=9"),
        ["prompt data/1 ({tmp}/data.jsonl:2)", "data.prompt_length_max=9", "raise it"],
        data(FINE, FINE.replace("1 + 1", "1 + 1 + 1 + 1 + 1")),
    ),
    "response over the limit": (
        train("rollout.response_length_max=5000"),
        ["rollout.response_length_max=5000", "max_position_embeddings (1024)", "lower"],
        None,
    ),
    "answer over the limit": (
        sft("run.name=other"),
        ["prompt data/0", "max_position_embeddings (1024)", "take the problem out"],
        data(json.dumps({"prompt": "x", "answer": "1" * 2000})),
    ),
    "unknown task": (
        train("data.train=[{reasoning_gym: basic_arithmetics}]"),
        ["'basic_arithmetics'", "nearest are basic_arithmetic"],
        None,
    ),
    # what the run continues from, and where it writes
    "no replay": (train("rollout.replay=/nowhere/rollouts"), ["rollout.replay", "/nowhere/rollouts"], None),
    "a replay that lacks a step": (
        train("rollout.replay={tmp}", "trainer.steps=5"),
        ["rollout.replay: {tmp}/step_000003.jsonl", "steps 3 to 5", "lower trainer.steps"],
        rollouts_of_step_3_missing,
    ),
    "a run of another command": (
        sft(),
        ["{runs}/finished", "`megagspo train`", "choose another run.name"],
        data(FINE),
    ),
    "a run directory below a file": (
        train("run.dir={tmp}/file"),
        ["{tmp}/file/finished cannot be written", "{tmp}/file is a file", "change run.dir"],
        file("file"),
    ),
    # other commands
    "eval of nothing": (["eval", "{tmp}/absent"], ["{tmp}/absent", "check the name"], None),
    "eval of some directory": (["eval", "{tmp}"], ["{tmp}", "config.yaml", "config.json"], None),
    "eval of a model outside a run": (["eval", "{model}"], ["{model}", "--config FILE"], None),
    "eval of a run without an export": (
        ["eval", "{tmp}"],
        ["{tmp}/hf is not there", "checkpoint.save_hf=true"],
        file("config.yaml"),
    ),
    "eval of a checkpoint": (
        ["eval", CONFIG, "model.path={model}", "model.checkpoint={tmp}/megatron"],
        ["model.checkpoint={tmp}/megatron", "megagspo convert megatron-to-hf {tmp}/megatron DIR"],
        None,
    ),
    "eval with two configurations": (
        ["eval", CONFIG, "--config", CONFIG],
        [CONFIG, "leave --config out"],
        None,
    ),
    "eval on nothing": (
        ["eval", CONFIG, "model.path={model}", "data.eval=[]"],
        ["data.eval is empty", "list a source"],
        None,
    ),
    "eval of a model without weights": (
        ["eval", CONFIG, "model.path={tmp}/model", "data.eval.0.size=2"],
        ["{tmp}/model", "no .safetensors file"],
        model_with(),
    ),
    "scores that cannot be written": (
        ["eval", "{runs}/finished", "--json", "{tmp}/absent/scores.json"],
        ["{tmp}/absent/scores.json cannot be written", "no directory {tmp}/absent", "with --json"],
        None,
    ),
    "convert of nothing": (
        ["convert", "megatron-to-hf", "{tmp}/absent", "{tmp}/hf"],
        ["{tmp}/absent is no Megatron checkpoint", "runs/NAME/checkpoints/step_000010"],
        None,
    ),
    "convert onto something": (
        ["convert", "hf-to-megatron", "{model}", "{tmp}"],
        ["{tmp} exists already", "remove it or give another name"],
        None,
    ),
}
if not torch.cuda.is_available():
    MISTAKES["no GPU"] = (
        train("platform.device=cuda"),
        ["platform.device=cuda", "no CUDA device", "platform.device=auto"],
        None,
    )


def filled(words: list[str], **places: Path) -> list[str]:
    for name, place in places.items():
        words = [word.replace(f"{{{name}}}", str(place)) for word in words]
    return words
