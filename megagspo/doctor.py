"""`megagspo doctor`: what this machine has, what works here, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table. detail: the version where it works, the remedy where it does not."""

    what: str
    works: bool
    detail: str


def findings() -> Iterator[Finding]:
    """Every check, in the order a newcomer needs them."""
    supported = platform.python_version_tuple()[:2] in (("3", "11"), ("3", "12"))
    remedy = "" if supported else ": megagspo needs 3.11 or 3.12"
    yield Finding(what="Python", works=supported, detail=platform.python_version() + remedy)
    for package in ("torch", "megatron-core", "transformers", "reasoning-gym", "math-verify"):
        yield _package(package, "run `make setup`")
    yield from _devices()
    yield _transformer_engine()
    free = shutil.disk_usage(".").free / 2**30
    yield Finding(what="disk", works=free > 2, detail=f"{free:.0f} GiB free here; a tiny run needs about 1")


def _package(name: str, remedy: str) -> Finding:
    try:
        return Finding(what=name, works=True, detail=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(what=name, works=False, detail=f"not installed: {remedy}")


def _devices() -> Iterator[Finding]:
    yield Finding(
        what="CPU (gloo)",
        works=True,
        detail=f"{len(os.sched_getaffinity(0))} cores; float32; everything here is tested on it",
    )
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding(what="CUDA (NCCL)", works=True, detail=names)
    else:
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no device"
        yield Finding(what="CUDA (NCCL)", works=False, detail=f"{why}: runs use the CPU")


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding(
            what="TransformerEngine",
            works=False,
            detail="not installed; only useful on a GPU: pip install 'megagspo[te]'",
        )
    return _package("transformer-engine", "")
