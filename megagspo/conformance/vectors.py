"""What a file of vectors holds, and reading it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from megagspo.config.messages import describe
from megagspo.config.section import Section
from megagspo.errors import DataError, MissingError


def _number_or_numbers(value: Any) -> Any:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, bool) or not isinstance(part, int | float):
            raise ValueError("must be a number, or a list of numbers")
    return value


Numbers = list[float]
Flags = list[Literal[0, 1, False, True]]


class _Entry(Section):
    """NaN is allowed: what becomes of it is something to conform about."""

    model_config = ConfigDict(allow_inf_nan=True)


class VectorSample(_Entry):
    """One response; all lists have one entry a token."""

    group: str | int
    """What the responses to one prompt share."""
    reward: float
    """The reward of the whole response."""
    mask: Flags
    """1 where the token is the model's own and learned from."""
    train_logprobs: Numbers
    """Of the policy that is differentiated."""
    old_logprobs: Numbers
    """Of the policy before the updates."""
    rollout_logprobs: Numbers | None = None
    """As the rollout engine gave them."""
    ref_logprobs: Numbers | None = None
    """Of the reference policy."""
    token_advantages: Numbers | None = None
    """Taken instead of advantages from rewards."""

    @model_validator(mode="after")
    def _lengths(self) -> VectorSample:
        for name, values in self:
            if isinstance(values, list) and len(values) != len(self.mask):
                raise ValueError(f"{name} has {len(values)} entries and mask {len(self.mask)}")
        return self


class Expectation(_Entry):
    """The right results, or any part of them."""

    loss: float | None = None
    """What is minimised."""
    advantages: list[Annotated[Any, AfterValidator(_number_or_numbers)]] | None = None
    """One number a sample, or a list with one a token."""
    gradients: list[Numbers] | None = None
    """d loss / d train_logprobs."""
    clipped: list[Flags] | None = None
    """Which tokens are clipped."""
    refused: bool = False
    """The settings are not to be accepted at all."""


class Vector(_Entry):
    """One entry of a file of vectors."""

    name: str
    """What the entry is called in tables."""
    note: str = ""
    """For people."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """As in a configuration."""
    samples: list[VectorSample]
    """The responses of one optimizer update."""
    expect: Expectation = Expectation()
    """The right results."""


def shipped_vectors() -> Path:
    """The directory of this project's own vectors: in the repository, or where the wheel put it. Raises
    MissingError where there is none."""
    repository = Path(__file__).resolve().parents[2] / "tests" / "conformance"
    if (repository / "gspo.json").is_file():
        return repository
    try:
        installed = metadata.files("megagspo") or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.parts[-4:] == ("share", "megagspo", "conformance", "gspo.json"):
            return Path(str(file.locate())).resolve().parent
    raise MissingError(
        f"the vectors of megagspo are neither in {repository} nor installed with the package: name a file or "
        "a directory of vectors with --vectors"
    )


def read_vectors(path: Path) -> list[Vector]:
    """The entries of a file, or of all JSON files of a directory. Raises DataError naming file, entry and
    field, MissingError where there is nothing to read."""
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise MissingError(f"{path} has no file *.json: name a file or a directory of vectors")
        return [vector for file in files for vector in read_vectors(file)]
    if not path.is_file():
        raise MissingError(f"there is no file {path}: name a file or a directory of vectors")
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"{path} holds no list of entries: a file of vectors is a list of objects, one a case"
        )
    return [_vector(entry, f"{path}, entry {position}") for position, entry in enumerate(entries)]


def _vector(entry: Any, place: str) -> Vector:
    try:
        return Vector.model_validate(entry)
    except ValidationError as error:
        if not isinstance(entry, dict):
            raise DataError(f"{place} must be a mapping of keys to values") from error
        if isinstance(name := entry.get("name"), str):
            place = f"{place} ({name})"
        raise DataError("\n".join(describe(error, schema=Vector, places={}, default_place=place))) from error
