"""A file that grows by whole pieces."""

from __future__ import annotations

import os
from pathlib import Path

from megagspo.errors import writing


class AppendedFile:
    """Appends to a file, unbuffered. A piece for which there is no room leaves the file as it was before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """It is in the file when this returns. Raises DiskError or UnwritableError otherwise."""
        end = os.fstat(self._file.fileno()).st_size
        with writing(self._path):
            try:
                left = memoryview(piece)
                while left:  # a disk that is nearly full takes a part before it refuses
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        self._file.close()
