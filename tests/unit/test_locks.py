"""Both stacks install what pyproject.toml asks for; their versions differ where they are meant to."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = ["requirements.lock", "requirements-3.12.lock"]


def normal(name: str) -> str:
    """The name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = (REPOSITORY / file).read_text().splitlines()
    entries = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in entries}


@pytest.mark.parametrize("file", LOCKS)
def test_lock_pins_every_dependency(file: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {normal(re.split(r"[\[<>=!~ ;]", requirement)[0]) for requirement in wanted}
    assert names - set(pins(file)) == set()


def test_locks_differ_in_what_makes_the_second_stack_alone() -> None:
    first, second = (set(pins(file).items()) for file in LOCKS)
    assert {name for name, _ in first ^ second} == {"megatron-core", "torch", "setuptools"}
