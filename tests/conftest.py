"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))  # tools/ is not installed with the package


def require(name: str, present: object) -> None:
    """Skips the test where its prerequisite is absent; fails it where the environment variable REQUIRE, a
    list with commas, names it, as in continuous integration."""
    if present:
        return
    if name in os.environ.get("REQUIRE", "").split(","):
        pytest.fail(f"{name} is not there, and REQUIRE lists it", pytrace=False)
    pytest.skip(f"{name} is not there")


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


@dataclass(frozen=True)
class SmallDisk:
    """A file system of its own, of 40 MiB at first."""

    path: Path

    def remount(self, option: str) -> None:
        """With another size (`size=2m`), or read-only (`ro`)."""
        subprocess.run(["mount", "-o", f"remount,{option}", self.path], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that can be full. Skips where nothing can be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk, and not on every machine")
    yield SmallDisk(path)
    # Lazily: a test that failed may still hold a file open.
    subprocess.run(["umount", "--lazy", path], check=True)
