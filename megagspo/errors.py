"""Every error megagspo raises on purpose has one root, so that a caller can catch them all.

A user's mistake (`UserError`, exit status 2) says what is wrong, where, and how to mend it; a failure (exit
status 1) says what could not be done and what state it leaves behind. Broken internal assumptions are plain
`assert`.
"""


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
    """A NaN or infinity appeared where none may be. The message names the sample."""
