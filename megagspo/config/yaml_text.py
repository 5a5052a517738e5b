"""YAML as this project reads it: safe, no key twice, `3e-4` is a number, and every value knows its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from megagspo.errors import ConfigError

Location = tuple[str | int, ...]
"""The keys and list positions that lead to a value."""

# YAML 1.1 asks for a dot in a number with an exponent and takes 3e-4 for text. It also takes 2025-01-31 for a
# date, which is a fine name for a run.
_EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (the library's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# Both need it: what is read as a number must be quoted when it is written as text.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """A parsed text. lines: the line on which each value stands, counted from 1."""

    value: Any
    lines: dict[Location, int]


def parse(text: str, *, where: str) -> Document:
    """Reads one YAML document. Raises ConfigError, naming `where` and the line, for what cannot be read."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return Document(None, {})
            lines = dict(_lines(node, (), where))
            return Document(loader.construct_document(node), lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_sentence(error, where)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where}: this is not valid YAML: {error}: mend it") from error


def dump(value: Any) -> str:
    """Writes plain data so that `parse` reads it back equal, keys in their own order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dotted(location: Location) -> str:
    """A location as people write it: data.train.0.size."""
    return ".".join(str(part) for part in location)


def _sentence(error: yaml.MarkedYAMLError, where: str) -> str:
    """Where reading stopped, and where what could not be read began: a bracket may be open for long."""
    stopped, began = error.problem_mark or error.context_mark, error.context_mark
    place = f", line {stopped.line + 1}" if stopped else ""
    inside = f" {error.context} from line {began.line + 1} on" if began and error.problem else ""
    return f"{where}{place}: this is not valid YAML: {error.problem or error.context}{inside}: mend it there"


def _lines(node: yaml.Node, location: Location, where: str) -> Iterator[tuple[Location, int]]:
    """The line of every value below node. Refuses a key given twice: YAML would silently take the last."""
    yield location, node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _lines(item, (*location, position), where)
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[Location, int] = {}
        for key, value in node.value:
            here, line = (*location, str(key.value)), key.start_mark.line + 1
            if here in first_lines:
                raise ConfigError(
                    f"{where}, line {line}: {dotted(here)} is given twice, "
                    f"first on line {first_lines[here]}: keep one of them"
                )
            first_lines[here] = line
            yield here, line
            # The key's own line, not the line where a nested mapping begins, is what a reader looks for.
            yield from (entry for entry in _lines(value, here, where) if entry[0] != here)
