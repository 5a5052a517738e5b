"""What differs between two Hugging Face directories."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from megagspo.convert.safetensors_io import HfCheckpoint

_SHOWN = 20
_NOT_COMPARED = {"README.md", ".gitattributes"}


def differences(a: Path, b: Path) -> list[str]:
    """The first differences in names, shapes, dtypes, values (bit for bit) and side files, in words; empty
    when there are none."""
    return list(islice(_all_differences(a, b), _SHOWN))


def _all_differences(a: Path, b: Path) -> Iterator[str]:
    left, right = HfCheckpoint(a), HfCheckpoint(b)
    for name in sorted(set(left) | set(right)):
        if name not in right or name not in left:
            yield f"{name} is only in {a if name in left else b}"
            continue
        x, y = left[name], right[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            yield f"{name}: {x.dtype} {list(x.shape)} against {y.dtype} {list(y.shape)}"
        elif not torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
            gap = (x.double() - y.double()).abs().max().item()
            yield f"{name}: values differ, by at most {gap:g}"
    for file in sorted(_side_files(a) | _side_files(b)):
        if not ((a / file).is_file() and (b / file).is_file()):
            yield f"{file} is only in {a if (a / file).is_file() else b}"
        elif (a / file).read_bytes() != (b / file).read_bytes():
            yield f"{file} differs"


def _side_files(directory: Path) -> set[str]:
    return {
        file.name
        for file in directory.iterdir()
        if file.is_file() and not file.name.startswith("model") and file.name not in _NOT_COMPARED
    }
