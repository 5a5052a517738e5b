"""Commands as a user types them, on a model small enough that each takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def megagspo() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `megagspo WORDS` in the repository's root and returns what came of it."""

    def run(*words: object, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "megagspo", *map(str, words)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert not check or result.returncode == 0, (
            f"{words}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        )
        return result

    return run


@pytest.fixture(scope="session")
def warm_model(
    megagspo: Callable[..., object], tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face directory after a short warm-up: it answers with digits, and sometimes rightly."""
    from tools.make_demonstrations import make_demonstrations

    runs = tmp_path_factory.mktemp("warm")
    demonstrations = runs / "demonstrations.jsonl"
    make_demonstrations(ROOT / "configs/tiny_moe_cpu.yaml", demonstrations, wrong=0.0)
    megagspo(
        "sft",
        "configs/tiny_moe_sft_cpu.yaml",
        f"run.dir={runs}",
        f"model.path={tiny_moe_dir}",
        f"data.train.0.jsonl={demonstrations}",
        "trainer.steps=200",
        "parallel.expert=1",
        "checkpoint.every=0",
    )
    return runs / "tiny_moe_warm" / "hf"
