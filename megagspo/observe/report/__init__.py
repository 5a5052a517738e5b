"""`megagspo report`: one self-contained HTML page about a run. Light: what it needs is loaded when asked."""

from __future__ import annotations

import os
from pathlib import Path

from megagspo.errors import UnwritableError, writing


def write_report(directory: Path, *, output: Path | None = None) -> Path:
    """Writes the page about the run in `directory` to `output` (default `report.html` in it); returns where.

    The page depends on the files of the run alone: the same directory gives the same bytes. It appears whole
    or not at all. Raises MissingError where there is no run or no metrics yet, DataError for a file of the
    run that is broken, UnwritableError or DiskError when the page cannot be written.
    """
    from megagspo.observe.report.page import render
    from megagspo.observe.report.reading import read_run

    page = render(read_run(directory))
    output = output or directory / "report.html"
    if output.is_dir():
        raise UnwritableError(
            f"report {output} cannot be written, it is a directory: name a file with --output"
        )
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with writing(output, what="report", elsewhere="name another place with --output", then="try again"):
        try:
            # A lone surrogate, which JSON may hold and UTF-8 may not, is written as an escape.
            with unfinished.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(output)
        finally:
            unfinished.unlink(missing_ok=True)
    return output
