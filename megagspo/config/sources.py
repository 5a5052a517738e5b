"""The `data` section. A source is told apart by the key it has: `reasoning_gym: TASK` or `jsonl: FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from megagspo.config.section import AtLeastOne, NotNegativeInt, Section, Text


class _Source(Section):
    name: Text | None = None
    """What the source is called in prompt ids; null: the task or the file's stem."""
    template: Literal["none", "chat"] = "none"
    """none: the text and a line break; chat: the tokenizer's chat template is put around it."""


class ReasoningGymSource(_Source):
    """Problems made by a reasoning-gym task."""

    reasoning_gym: Text
    """The task, for instance basic_arithmetic."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, passed on as they are."""
    size: AtLeastOne = 1000
    """How many problems are made."""
    seed: NotNegativeInt = 0
    """Decides which problems are made. Give training and evaluation different seeds."""

    @property
    def label(self) -> str:
        """The source's name in prompt ids."""
        return self.name or self.reasoning_gym


class JsonlSource(_Source):
    """Problems read from a file with one JSON object a line."""

    jsonl: Text
    """The file; a relative path starts at the working directory."""
    prompt: Text = "prompt"
    """The field that holds the prompt."""
    answer: Text = "answer"
    """The field that holds the reference answer."""

    @property
    def label(self) -> str:
        """The source's name in prompt ids."""
        return self.name or Path(self.jsonl).stem


# The tags appear in error locations, where the angle brackets tell them from keys.
_TAGS = {"reasoning_gym": "<reasoning_gym>", "jsonl": "<jsonl>"}


def _tag(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    found = [tag for key, tag in _TAGS.items() if key in keys]
    return found[0] if len(found) == 1 else None


Source = Annotated[
    Annotated[ReasoningGymSource, Tag(_TAGS["reasoning_gym"])] | Annotated[JsonlSource, Tag(_TAGS["jsonl"])],
    Discriminator(
        _tag,
        custom_error_type="source_kind",
        custom_error_message="Input should be a source with exactly one of the keys " + ", ".join(_TAGS),
    ),
]


class DataConfig(Section):
    """Where prompts come from."""

    train: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
    """A list of sources to train on, for instance [{jsonl: train.jsonl}]."""
    eval: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    """A list of sources to evaluate on; may be empty."""
    prompt_length_max: AtLeastOne = 512
    """A longer prompt, in tokens, is an error that names it."""

    @field_validator("train", "eval")
    @classmethod
    def _labels_differ(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        """Prompt ids are <source>/<index>: two sources of one name would share ids."""
        labels = [source.label for source in sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two sources are called {label}: give one of them another name")
        return sources
