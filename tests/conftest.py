"""Fixtures that every test folder may use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))  # tools/ is not installed with the package


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE checkpoint in Hugging Face layout, made once a session. Read it, never write to it."""
    from tools.make_tiny_moe import make_tiny_moe

    destination = tmp_path_factory.mktemp("models") / "tiny_moe"
    make_tiny_moe(destination)
    return destination


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_moe_dir: Path) -> Any:
    """The tokenizer of `tiny_moe_dir`, loaded as a user's would be."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_moe_dir)
