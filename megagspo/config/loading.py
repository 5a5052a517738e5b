"""From files and overrides to a `Config`, and back.

A file may say `extends: OTHER` (relative to itself): mappings are merged key by key, anything else,
lists included, is replaced. Overrides `section.key=value` come last; their values are YAML.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megagspo.config.messages import describe
from megagspo.config.schema import Config
from megagspo.config.yaml_text import Document, Location, dump, parse
from megagspo.errors import ConfigError, MissingError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration. Raises MissingError for a file that is not there, ConfigError for the rest.
    Values that do not fit the schema are all listed, one a line."""
    tree: dict[str, Any] = {}
    places: dict[Location, str] = {}
    for file, document in _chain(Path(path), ()):
        tree = _merged(tree, document.value)
        places |= {location: f"{file}, line {line}" for location, line in document.lines.items() if location}
    for text in overrides:
        location, document = _override(text)
        tree = _put(tree, location, document.value, text=text)
        places |= {location + below: f"override {text!r}" for below in ((), *document.lines)}
    try:
        return Config.model_validate(_without_empty_sections(tree))
    except ValidationError as error:
        lines = describe(error, schema=Config, places=places, default_place=str(path))
        raise ConfigError("\n".join(lines)) from error


def dump_config(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back equal."""
    return dump(config.model_dump())


def _chain(path: Path, below: tuple[Path, ...]) -> Iterator[tuple[Path, Document]]:
    """The files that path rests on, the deepest first, and path itself last."""
    if path.resolve() in [file.resolve() for file in below]:
        circle = " -> ".join(str(file) for file in (*below, path))
        raise ConfigError(f"extends goes in a circle, {circle}: remove one of them")
    document = _read(path, below)
    extends = document.value.pop("extends", None)
    if extends is not None:
        if not isinstance(extends, str):
            line = document.lines["extends",]
            raise ConfigError(f"{path}, line {line}: extends must be the name of one file, not {extends!r}")
        yield from _chain(Path(os.path.normpath(path.parent / extends)), (*below, path))
    yield path, document


def _read(path: Path, below: tuple[Path, ...]) -> Document:
    asked = f", which {below[-1]} extends (relative to that file's directory)" if below else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(f"there is no configuration file {path}{asked}: check the name") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}{asked}: {error}") from error
    document = parse(text, where=str(path))
    if document.value is None:
        return Document({}, {})
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{path}: must hold sections such as `model:` and `data:`, not {document.value!r:.60}"
        )
    return document


def _override(text: str) -> tuple[Location, Document]:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r}: write section.key=value, for instance trainer.steps=10")
    location = tuple(int(part) if part.isdecimal() else part for part in parts)
    return location, parse(value, where=f"override {text!r}")


def _put(tree: Any, location: Location, value: Any, *, text: str) -> Any:
    """A copy of tree with value merged in at location. A number picks an entry of a list that is there."""
    if not location:
        return _merged(tree, value)
    head, rest = location[0], location[1:]
    if isinstance(tree, list):
        if not isinstance(head, int) or head >= len(tree):
            raise ConfigError(
                f"override {text!r}: {head} is not a position in the list ({len(tree)} entries, counted "
                "from 0): name one that is there, or give the whole list as [...]"
            )
        return [*tree[:head], _put(tree[head], rest, value, text=text), *tree[head + 1 :]]
    mapping = tree if isinstance(tree, dict) else {}
    return {**mapping, str(head): _put(mapping.get(str(head)), rest, value, text=text)}


def _merged(base: Any, value: Any) -> Any:
    """Mappings key by key; everything else is replaced."""
    if not (isinstance(base, dict) and isinstance(value, dict)):
        return value
    return {**base, **{key: _merged(base.get(key), entry) for key, entry in value.items()}}


def _without_empty_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """A section whose keys are all commented out reads as null and means its defaults. A required section
    that is absent becomes an empty one, so that the message names the key that is missing in it."""
    required: dict[str, Any] = {
        name: {} for name, field in Config.model_fields.items() if field.is_required()
    }
    return required | {name: section for name, section in tree.items() if section is not None}
