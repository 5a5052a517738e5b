"""The package's structure: imports point one way, and light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megagspo"

# Lower tiers first. A module may import its own package and packages of lower tiers.
TIERS = [
    {"types", "errors"},
    {"config"},
    {"algo", "data", "convert", "model", "platform"},
    {"rollout", "reward", "policy", "sync", "observe"},
    {
        *("inputs", "assembly", "stages", "measure", "scores", "evaluate", "loop", "sft"),
        *("conversion", "conformance", "doctor"),
    },
    {"launcher"},
    {"cli"},
    {"__main__"},
]
# What the one-way rule allows beyond that, each with its reason.
ALLOWED = {
    ("model", "platform"): "the model is built for a device",
}
TIER_OF = {name: number for number, tier in enumerate(TIERS) for name in tier}
# The loop's tier reads top to bottom: each may import those before it.
LOOP_TIER = [
    *("inputs", "assembly", "stages", "measure", "scores", "evaluate", "loop", "sft"),
    *("conversion", "conformance", "doctor"),
]


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE).parts[0].removesuffix(".py"), file


def imported(file: Path) -> Iterator[str]:
    """First-level names of the package that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "megagspo" and len(parts) > 1:
                yield parts[1]


def test_every_module_belongs_to_a_tier() -> None:
    assert {name for name, _ in modules()} - {"__init__"} == set(TIER_OF)


@pytest.mark.parametrize(
    ("owner", "file"), [pytest.param(o, f, id=str(f.relative_to(PACKAGE))) for o, f in modules()]
)
def test_imports_point_one_way(owner: str, file: Path) -> None:
    if owner == "__init__":
        return
    for name in imported(file):
        if name == owner:
            continue
        if owner in LOOP_TIER and name in LOOP_TIER:
            assert LOOP_TIER.index(name) < LOOP_TIER.index(owner), (
                f"{file} imports {name}, which comes after it"
            )
        elif (owner, name) not in ALLOWED:
            assert TIER_OF[name] < TIER_OF[owner], f"{file} imports {name}, which is not of a lower tier"


@pytest.mark.parametrize(
    "module",
    ["megagspo.cli", "megagspo.launcher.preflight", "megagspo.config", "megagspo.model.architecture"],
)
def test_light_modules_import_neither_torch_nor_megatron(module: str) -> None:
    heavy = "{'torch', 'megatron', 'transformers'}"
    code = f"import {module}, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_and_no_function_grows_out_of_hand() -> None:
    for _, file in modules():
        text = file.read_text()
        assert text.count("\n") <= 400, f"{file} has over 400 lines: is it one subject?"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"{file}:{node.lineno} {node.name} has {length} lines"


def test_nothing_but_the_fenced_module_assigns_to_foreign_attributes() -> None:
    foreign = {
        "torch",
        "dist",
        "parallel_state",
        "mappings",
        "moe_utils",
        "token_dispatcher",
        "random",
        "transformers",
    }
    for _, file in modules():
        if file == PACKAGE / "platform" / "cpu.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                attribute = (
                    isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in foreign
                )
                assert not attribute, f"{file}:{node.lineno} assigns to a foreign attribute"
