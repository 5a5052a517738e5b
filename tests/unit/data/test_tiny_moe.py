"""The tiny checkpoint is what tests and the quickstart take it for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tools.make_tiny_moe import make_tiny_moe


def tensor_names(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_the_file_has_the_released_layout_with_one_tensor_an_expert(tiny_moe_dir: Path) -> None:
    names = tensor_names(tiny_moe_dir)
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert {f"model.layers.3.mlp.experts.{e}.{part}.weight" for e in range(8)} <= names
    assert {
        "lm_head.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate.weight",
    } <= names
    config = json.loads((tiny_moe_dir / "config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"] == 8


def test_every_digit_is_a_token_and_any_text_survives(tiny_moe_dir: Path, tiny_tokenizer: Any) -> None:
    assert json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"] == len(tiny_tokenizer)
    assert [tiny_tokenizer.decode([each]) for each in tiny_tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    text = "Calculate 95 + 21.\n日 é , a"
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    assert tiny_tokenizer.pad_token == tiny_tokenizer.eos_token == "<|endoftext|>"


def test_the_seed_decides_the_weights_and_nothing_else(tmp_path: Path, tiny_moe_dir: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        make_tiny_moe(tmp_path / name, seed=seed)
    files = {path.name for path in tiny_moe_dir.iterdir()}
    differing = {
        seed: {
            file
            for file in files
            if (tmp_path / seed / file).read_bytes() != (tiny_moe_dir / file).read_bytes()
        }
        for seed in ("same", "other")
    }
    assert differing == {"same": set(), "other": {"model.safetensors"}}


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    script = Path(__file__).parents[3] / "tools" / "make_tiny_moe.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
