from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from megagspo.config import Config, load_config


@pytest.fixture
def minimal() -> str:
    """The two keys that every configuration needs."""
    return "model: {path: models/tiny}\ndata:\n  train: [{jsonl: train.jsonl}]\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a named YAML file and returns its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def load(write: Callable[[str, str], Path], minimal: str) -> Callable[..., Config]:
    """Loads a configuration that adds `text` to the two keys every configuration needs."""

    def load_text(*overrides: str, text: str = "") -> Config:
        write("minimal.yaml", minimal)
        return load_config(write("config.yaml", "extends: minimal.yaml\n" + textwrap.dedent(text)), overrides)

    return load_text
