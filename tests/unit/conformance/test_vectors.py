"""Files of vectors: what is read, and what malformed ones are told."""

from __future__ import annotations

import copy
import json
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from megagspo.conformance import vectors
from megagspo.conformance.vectors import read_vectors, shipped_vectors
from megagspo.errors import DataError, MissingError

ENTRY: dict[str, Any] = {
    "name": "mine",
    "samples": [
        {"group": 1, "reward": 1, "mask": [1, 0], "train_logprobs": [-1, -2.5], "old_logprobs": [-1, -2]}
    ],
}


def changed(path: str, value: Any) -> list[dict[str, Any]]:
    """The entry with one value replaced, or with None for the value removed."""
    entry = copy.deepcopy(ENTRY)
    place: Any = entry
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return [ENTRY, entry]


def written(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "mine.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_whole_numbers_truth_values_and_nulls_are_fine(tmp_path: Path) -> None:
    entry = copy.deepcopy(ENTRY)
    entry["samples"][0] |= {"mask": [True, False], "ref_logprobs": None}
    (vector,) = read_vectors(written(tmp_path, [entry]))
    assert vector.samples[0].train_logprobs == [-1.0, -2.5]
    assert vector.expect.loss is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["mine.json", "cannot be read as JSON"]),
        ({"name": "x"}, ["holds no list"]),
        ([], ["holds no list of entries"]),
        ([3], ["entry 0", "must be a mapping"]),
        (changed("name", None), ["entry 1", "name is missing"]),
        (changed("samples", None), ["entry 1 (mine)", "samples is missing"]),
        (changed("samples", 3), ["entry 1 (mine)", "samples"]),
        (changed("samples.0.reward", "high"), ["samples.0.reward must be a number, not 'high'"]),
        (changed("samples.0.mask", [1, 2]), ["samples.0.mask.1", "0, 1", "not 2"]),
        (changed("samples.0.mask", [1]), ["samples.0: train_logprobs has 2 entries and mask 1"]),
        (changed("samples.0.old_logprobs", None), ["samples.0.old_logprobs is missing"]),
        (changed("samples.0.old_logprobs", [-1]), ["samples.0: old_logprobs has 1 entries and mask 2"]),
        (
            changed("samples.0.old_logprob", [-1, 1]),
            ["samples.0.old_logprob", "did you mean", "old_logprobs?"],
        ),
        (changed("algorithm", "gspo"), ["algorithm must be a mapping"]),
        (changed("expected", {}), ["unknown key expected", "did you mean expect?"]),
        (changed("expect", {"los": 1.0}), ["unknown key expect.los", "expect.loss?"]),
        (changed("expect", {"loss": "0"}), ["expect.loss must be a number, not '0'"]),
        (changed("expect", {"advantages": ["a"]}), ["expect.advantages.0: must be a number, or a list of"]),
        (changed("expect", {"gradients": [0.0]}), ["expect.gradients.0 must be a list"]),
        (changed("expect", {"clipped": [[0.5]]}), ["expect.clipped.0.0"]),
    ],
)
def test_a_malformed_file_is_named_with_entry_and_field(
    tmp_path: Path, content: Any, words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        read_vectors(written(tmp_path, content))
    for word in words:
        assert word in str(caught.value)
    assert "mine.json" in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no file .*absent\.json"):
        read_vectors(tmp_path / "absent.json")
    with pytest.raises(MissingError, match=r"has no file \*\.json"):
        read_vectors(tmp_path)


def test_the_vectors_of_the_repository_are_found() -> None:
    assert shipped_vectors() == Path(__file__).parents[2] / "conformance"


def test_installed_vectors_are_found_where_the_wheel_put_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "share" / "megagspo" / "conformance"
    folder.mkdir(parents=True)

    class File(PurePosixPath):
        def locate(self) -> Path:
            return folder / self.name

    recorded = [File("megagspo/cli.py"), File("../../../share/megagspo/conformance/gspo.json")]
    monkeypatch.setattr(
        vectors, "__file__", str(tmp_path / "lib" / "megagspo" / "conformance" / "vectors.py")
    )
    monkeypatch.setattr(vectors, "metadata", SimpleNamespace(files=lambda _: recorded, **ERRORS))
    assert shipped_vectors() == folder


ERRORS = {"PackageNotFoundError": metadata.PackageNotFoundError}


def test_without_vectors_the_option_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        vectors, "__file__", str(tmp_path / "lib" / "megagspo" / "conformance" / "vectors.py")
    )
    monkeypatch.setattr(vectors, "metadata", SimpleNamespace(files=lambda _: None, **ERRORS))
    with pytest.raises(MissingError, match="name a file or a directory of vectors with --vectors"):
        shipped_vectors()
