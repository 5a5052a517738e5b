"""What every section of the configuration has in common, and the few number types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A strict, frozen part of the configuration.

    Strict, because a silently converted value ("2" for 2, true for 1) hides a mistake. The text under a field
    is its description: error messages and documentation are made from it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


AtLeastOne = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
