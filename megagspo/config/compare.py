"""What changed between two configurations, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def changes(before: str, after: str) -> list[str]:
    """One line a key whose value differs between two resolved configurations in YAML (`dump_config`)."""
    old, new = dict(_leaves(yaml.safe_load(before))), dict(_leaves(yaml.safe_load(after)))
    absent = "not set"
    return [
        f"{key} was {old.get(key, absent)}, is now {new.get(key, absent)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent) != new.get(key, absent)
    ]


def _leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, tree
