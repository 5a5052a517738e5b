"""How numbers and untrusted text appear on the page."""

from __future__ import annotations

import math
import unicodedata
from decimal import ROUND_HALF_UP, Decimal, localcontext


def number(value: float) -> str:
    """A few digits of a number. `page.js` writes numbers in the same way, rounding halves up as JavaScript
    does."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value == 0:
        return "0"
    size = abs(value)
    if size < 0.01 or size >= 1e7:
        form = ".1e"
    else:
        form = ",.0f" if size >= 1000 else ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f"
    with localcontext(rounding=ROUND_HALF_UP):
        return format(Decimal(value), form)


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which to show a time: its length in seconds, and its name."""
    return (1.0, "s") if seconds < 60 else (60.0, "min") if seconds < 3600 else (3600.0, "h")


def duration(seconds: float) -> str:
    """A time in the unit that suits it, for instance `4.1 min`."""
    length, unit = time_unit(seconds)
    return f"{seconds / length:.1f} {unit}"


def count(value: int) -> str:
    """A large count in a few digits, for instance `1.9 M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def printable(text: str) -> str:
    """Text of unknown origin with every character visible or harmless: control, surrogate and invisible
    formatting characters become `\\u{hex}`. Escaping for HTML is the template's part."""
    return "".join(
        f"\\u{{{ord(char):x}}}"
        if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\n\t\u200c\u200d"
        else char
        for char in text
    )
