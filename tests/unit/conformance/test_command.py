"""`megagspo conformance` as a user types it, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megagspo.cli import main
from tests.conformance import generate

ENTRIES = generate.files()["gspo"][:2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `megagspo conformance WORDS`; returns exit status, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megagspo", "conformance", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_:
            main()
        output = capsys.readouterr()
        return int(exit_.value.code or 0), output.out, output.err

    return run


def file_of(tmp_path: Path, entries: Any) -> Path:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(entries))
    return file


def test_the_vectors_of_the_package_pass(command: Any) -> None:
    status, output, _ = command()
    count = sum(map(len, generate.files().values()))
    assert status == 0
    assert f"{count} of {count} vectors pass" in output
    assert "FAIL" not in output


def test_results_are_written_in_the_order_of_the_entries(command: Any, tmp_path: Path) -> None:
    """Without an expectation, too; a refusal is written with its message."""
    bare = {key: value for key, value in ENTRIES[0].items() if key != "expect"} | {"name": "bare"}
    wide = bare | {"name": "wide", "algorithm": {"clip_high": 0.2}, "expect": {"refused": True}}
    status, output, _ = command(
        "--vectors", file_of(tmp_path, [*ENTRIES, bare, wide]), "--json", tmp_path / "out.json"
    )
    assert status == 0
    assert "4 of 4 vectors pass" in output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [entry["name"] for entry in found] == [*(entry["name"] for entry in ENTRIES), "bare", "wide"]
    for entry, given in zip(found[:2], ENTRIES, strict=True):
        assert entry.keys() == {"name", "loss", "advantages", "gradients", "clipped"}
        assert entry["loss"] == pytest.approx(given["expect"]["loss"], rel=1e-9)
        assert entry["clipped"] == given["expect"]["clipped"]
    assert found[2] == found[0] | {"name": "bare"}
    assert found[3].keys() == {"name", "refused"}
    assert "3e-4 and 4e-4" in found[3]["refused"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expect": {"loss": 7.0}}, ["loss: expected 7.0, got"]),
        ({"expect": {"gradients": [[0.0]]}}, ["gradients: expected 1 entries, got 6"]),
        ({"expect": {"refused": True}}, ["accepted, but was to be refused"]),
        ({"algorithm": {"name": "gspo", "dual_clip": 3.0}}, ["refused: algorithm.dual_clip=3"]),
        ({"algorithm": {"name": "gspo", "clip": 3.0}}, ["refused: algorithm: unknown key clip"]),
        ({"algorithm": {"entropy_coefficient": 0.1}}, ["refused: algorithm.entropy_coefficient=0.1"]),
    ],
)
def test_a_vector_that_fails_says_where_and_the_command_exits_1(
    command: Any, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    status, output, _ = command("--vectors", file_of(tmp_path, [ENTRIES[0] | change, ENTRIES[1]]))
    assert status == 1
    assert "1 of 2 vectors pass" in output
    for word in words:
        assert word in output


def test_a_malformed_file_is_a_users_mistake(command: Any, tmp_path: Path) -> None:
    status, _, errors = command("--vectors", file_of(tmp_path, [ENTRIES[0] | {"samples": 3}]))
    assert status == 2
    assert errors.startswith("error: ")
    assert "mine.json, entry 0 (gspo default range): samples" in errors
    status, _, errors = command("--vectors", tmp_path / "absent.json")
    assert status == 2
    assert "absent.json" in errors


def test_a_place_that_cannot_be_written_is_a_users_mistake(command: Any, tmp_path: Path) -> None:
    status, _, errors = command(
        "--vectors", file_of(tmp_path, ENTRIES), "--json", tmp_path / "no" / "out.json"
    )
    assert status == 2
    assert "name another file with --json" in errors


def test_help_has_an_example(command: Any) -> None:
    status, output, _ = command("--help")
    assert status == 0
    assert "Example: megagspo conformance --vectors" in output
