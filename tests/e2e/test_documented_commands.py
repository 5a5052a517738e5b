"""Every command that a README shows is run, as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/**/README.md"))]
PROGRAMS = ("megagspo", "make", "python", ".venv/bin/")

# Appended to a documented command, so that what takes minutes takes seconds.
SHORTER = {
    "megagspo train": "trainer.steps=1 rollout.prompts=4 rollout.responses=4 data.eval.0.size=20",
    "megagspo sft": "trainer.steps=1 checkpoint.every=0",
    "megagspo eval": "data.eval.0.size=20",
    "tools/bench/peer_trl.py": "--help",  # the peer is not among the project's dependencies
    "tools/bench/logprob.py": "--help",
    "tools/demo.py": "--help",  # run whole by test_demo.py
}


def documented() -> list[str]:
    """The commands in indented and fenced blocks of the pages of the repository, without comments."""
    found: dict[str, None] = {}
    for page in PAGES:
        if ".venv" in page.parts:
            continue
        fenced = False
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif (fenced or line.startswith("    ")) and line.strip().startswith(PROGRAMS):
                found[re.split(r"\s+#", line.strip())[0].strip()] = None
    return list(found)


@pytest.fixture(scope="module")
def checkout(
    megagspo: Command, tiny_moe_dir: Path, warm_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory like the repository's root after `make demo`, on a smaller scale."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "tools", "tests"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(warm_model, root / "runs/tiny_moe_warm/hf")
    shutil.copytree(tiny_moe_dir, root / "runs/tiny_moe_init")
    shutil.copy(warm_model.parents[1] / "demonstrations.jsonl", root / "runs/tiny_moe_init")
    base = ("configs/tiny_moe_cpu.yaml", f"model.path={warm_model}", f"run.dir={root / 'runs'}")
    megagspo("train", *base, "run.name=demo", "parallel.expert=1", *shlex.split(SHORTER["megagspo train"]))
    return root


def test_there_are_documented_commands() -> None:
    assert len([command for command in documented() if command.startswith("megagspo ")]) >= 8


@pytest.mark.parametrize("command", [c for c in documented() if not c.startswith("make ")])
def test_documented_command_works(checkout: Path, command: str) -> None:
    """In the order in which they are documented, as some read what others wrote."""
    elsewhere = checkout / "elsewhere"  # stands for /tmp
    elsewhere.mkdir(exist_ok=True)
    words = shlex.split(command.replace("/tmp/", f"{elsewhere}/"))
    script = " ".join(words[1:]) if words[0].endswith("python") else command
    for name, more in SHORTER.items():
        if script.startswith(name):
            words += shlex.split(more)
    program = [sys.executable, "-m", "megagspo"] if words[0] == "megagspo" else [sys.executable]
    result = subprocess.run(
        [*program, *words[1:]],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.mark.parametrize("command", [c for c in documented() if c.startswith("make ")])
def test_documented_target_is_known_to_make(command: str) -> None:
    """A target cannot run inside a test that it runs; `.ci/run` runs them all, `make demo` through the test
    of the script behind it."""
    program, *words = shlex.split(command)
    dry = subprocess.run(
        [program, "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert dry.returncode == 0, dry.stderr
