"""Every error megagspo raises on purpose has one root, so that a caller can catch them all.

A user's mistake (`UserError`, exit status 2) says what is wrong, where, and how to mend it; a failure (exit
status 1) says what could not be done and what state it leaves behind. Broken internal assumptions are plain
`assert`.

What the file system refuses while something is written becomes one of these errors by `writing`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MegagspoError(Exception):
    """Root of all errors raised on purpose by megagspo. The command line exits with `exit_status`."""

    exit_status = 1


class UserError(MegagspoError):
    """Something the user wrote or asked for cannot work. The message names the thing, the place and the
    remedy."""

    exit_status = 2


class ConfigError(UserError, ValueError):
    """The configuration is not valid, or two of its values contradict each other."""


class MissingError(UserError, FileNotFoundError):
    """A file or directory that the user named is not there."""

    # FileNotFoundError formats itself from (errno, strerror); a plain message is what we want.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DataError(UserError, ValueError):
    """A data source, prompt or saved rollout cannot be used."""


class ModelError(UserError, ValueError):
    """A model directory cannot be used: unsupported family, wrong shapes, missing or surplus tensors."""


class CheckpointError(MegagspoError, RuntimeError):
    """A checkpoint could not be written or is not whole."""


class EngineError(MegagspoError, RuntimeError):
    """A rollout engine refused, failed, or is not in a usable state."""


class PushError(EngineError):
    """A weight push did not end with every engine proven to hold the new weights."""


class NumericsError(MegagspoError, ArithmeticError):
    """A NaN or infinity appeared where none may be. The message names the sample, and so does `sample`: its
    id, None where it is not one sample's doing."""

    def __init__(self, message: str, *, sample: str | None = None) -> None:
        super().__init__(message)
        self.sample = sample


class DiskError(MegagspoError, OSError):
    """Something could not be written because the disk is full or failed. What was there before is
    untouched."""


class UnwritableError(UserError, PermissionError):
    """Something cannot be written where the user wants it: no permission, a read-only disk, a file in the
    way."""


# What room would mend, what another place or permission would, and what the user can only look into.
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
}
_BROKEN = {errno.EIO, errno.ESTALE, errno.EFBIG}
# Libraries that write by themselves (safetensors, torch) keep the system's number only in their text.
_NUMBER_IN_TEXT = re.compile(r"(?:\[Errno |os error )(\d+)")
# torch's zip writer has lost even that: it finds its file shorter than what it wrote.
_CUT_SHORT = re.compile(r"unexpected pos \d+ vs \d+")


@contextmanager
def writing(
    path: str | Path,
    *,
    what: str = "",
    elsewhere: str = "change run.dir",
    then: str = "start the run again, which goes on from its newest checkpoint if there is one",
) -> Iterator[None]:
    """Turns what the file system refuses in the block, which writes `path`, into one message for the user.

    what: what it is, put before its path; elsewhere: what they change to have it written to another place;
    then: what they do once there is room. The defaults fit the files of a run. Raises DiskError (exit
    status 1) where the disk is full or broken, UnwritableError (2) where nothing may be written. All other
    errors pass unchanged.
    """
    try:
        yield
    except MegagspoError:
        raise
    # safetensors and torch's checkpointing raise errors of their own, the latter a BaseException.
    except BaseException as error:
        number = disk_error_number(error)
        if number is None:
            raise
        subject, reason = f"{what} {path}".lstrip(), refusal(path, number)
        if number in _DENIED:
            raise UnwritableError(
                f"{subject} cannot be written ({reason}): {elsewhere}, or mend that"
            ) from error
        remedy = f"{'make room there' if number in _FULL else 'look after the disk'} or {elsewhere}"
        raise DiskError(f"{subject} could not be written ({reason}): {remedy}, then {then}") from error


def disk_error_number(error: BaseException) -> int | None:
    """The system's number (`errno`) of a file system's refusal, also where a library left it in the text
    alone; None for an error of another kind."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        text = str(error)
        found = _NUMBER_IN_TEXT.findall(text) or [errno.ENOSPC for _ in _CUT_SHORT.findall(text)]
        number = int(found[-1]) if found else None
    return number if number in _FULL | _DENIED | _BROKEN else None


def refusal(path: str | Path, number: int) -> str:
    """Why the file system refused to write `path`, in words, with the free space or what is in the way."""
    reason = os.strerror(number).lower()
    existing = next(place for place in (Path(path), *Path(path).absolute().parents) if os.path.exists(place))
    if number == errno.ENOSPC:
        return f"{reason}, {shutil.disk_usage(existing).free / 2**20:.1f} MiB are free"
    if number == errno.ENOENT:
        return f"there is no directory {Path(path).parent}"
    if number in (errno.ENOTDIR, errno.EEXIST) and not existing.is_dir():
        return f"{existing} is a file, not a directory"
    return reason
