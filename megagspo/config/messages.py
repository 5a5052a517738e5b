"""Turns pydantic's errors into sentences: which key, where it was written, what is wrong, what is right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from megagspo.config.yaml_text import Location, dotted

# Errors that only follow from another one, which is reported.
_CONSEQUENCES = {"default_factory_not_called"}
_CLEARER = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
    "too_short": "must be a list of {min_length} or more",
    "too_long": "must be a list of {max_length} or fewer",
}


def describe(
    error: ValidationError, *, schema: type[BaseModel], places: Mapping[Location, str], default_place: str
) -> list[str]:
    """One sentence an error. places: where each value was written; default_place: for what stands nowhere."""

    def place(detail: ErrorDetails) -> str:
        location = _plain(detail["loc"])
        # What is missing was written nowhere; an older list that this one replaces may have had it.
        return _place(location[:-1] if detail["type"] == "missing" else location, places) or default_place

    details = [detail for detail in error.errors() if detail["type"] not in _CONSEQUENCES]
    locations = [detail["loc"] for detail in details]
    return [
        _sentence(detail, schema=schema, place=place(detail))
        for detail in details
        if not (detail["type"] == "too_short" and _any_below(detail["loc"], locations))
    ]


def known_keys(schema: type[BaseModel]) -> dict[Location, str]:
    """Every key the schema knows, and its description. A list position is "*"; tags of alternatives stay."""
    return dict(_keys(schema, ()))


def _sentence(detail: ErrorDetails, *, schema: type[BaseModel], place: str) -> str:
    location = _plain(detail["loc"])
    name = dotted(location)
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key {name}: {_nearest(detail['loc'], schema)}"
    if detail["type"] == "missing":
        description = known_keys(schema).get(_pattern(detail["loc"]), "an entry of the list")
        return f"{place}: {name} is missing: set it ({description.rstrip('.')})"
    if detail["type"] == "value_error":
        return f"{place}: {name}: {detail['ctx']['error']}"
    given = detail["input"]
    clearer = _CLEARER.get(detail["type"], "").format_map(detail.get("ctx", {}))
    wanted = clearer or detail["msg"].replace("Input should be", "must be", 1)
    quote = (
        " (put it in quotes)" if detail["type"] == "string_type" and isinstance(given, int | float) else ""
    )
    return f"{place}: {name} {wanted}, not {_short(given)}{quote}"


def _nearest(loc: Location, schema: type[BaseModel]) -> str:
    """A key of the section that is spelled like it; else one elsewhere; else all that the section has."""
    pattern = _pattern(loc)
    known = list(known_keys(schema))
    siblings = {str(key[-1]): key for key in known if key[:-1] == pattern[:-1]}
    for candidates, cutoff in (
        (siblings, 0.6),
        ({str(key[-1]): key for key in reversed(known) if "*" not in key}, 0.8),
    ):
        matches = difflib.get_close_matches(str(pattern[-1]), candidates, n=1, cutoff=cutoff)
        if matches:
            found = candidates[matches[0]]
            if found[:-1] == pattern[:-1]:
                found = (*loc[:-1], matches[0])
            return f"did you mean {dotted(_plain(found))}?"
    return f"known here are {', '.join(siblings)}" if siblings else "remove it"


def _keys(schema: type[BaseModel], prefix: Location) -> Iterator[tuple[Location, str]]:
    for name, field in schema.model_fields.items():
        yield (*prefix, name), field.description or ""
        for parts, section in _sections(field.annotation):
            yield from _keys(section, (*prefix, name, *parts))


def _sections(annotation: Any) -> Iterator[tuple[Location, type[BaseModel]]]:
    """The sections inside a field's type, each with what pydantic puts between the field and its keys."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        tags = tuple(extra.tag for extra in arguments[1:] if isinstance(extra, Tag))
        yield from (((*tags, *parts), section) for parts, section in _sections(arguments[0]))
    elif get_origin(annotation) in (tuple, list):
        yield from (
            (("*", *parts), section) for argument in arguments for parts, section in _sections(argument)
        )
    elif arguments:
        yield from (found for argument in arguments for found in _sections(argument))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield (), annotation


def _pattern(loc: Location) -> Location:
    return tuple("*" if isinstance(part, int) else part for part in loc)


def _plain(loc: Location) -> Location:
    """Without the tags of alternatives, which the user never wrote."""
    return tuple(part for part in loc if not (isinstance(part, str) and part.startswith("<")))


def _place(location: Location, places: Mapping[Location, str]) -> str | None:
    """Where the value was written, or the nearest thing around it."""
    for length in range(len(location), 0, -1):
        if location[:length] in places:
            return places[location[:length]]
    return None


def _any_below(location: Location, others: list[Location]) -> bool:
    return any(len(other) > len(location) and other[: len(location)] == location for other in others)


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
