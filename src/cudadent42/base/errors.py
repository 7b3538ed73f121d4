"""Errors that a user sees, and the exit codes they end in."""

from __future__ import annotations

from enum import IntEnum

from flashmoe_science.errors import BuildError, DeviceError, InputError


class ExitCode(IntEnum):
    """What the process returns; the same for every command."""

    PASS = 0
    GATE_FAILED = 1
    USAGE = 2
    VERIFICATION_FAILED = 3
    NOT_READY = 4
    BUILD_FAILED = 5
    GATE_UNDECIDED = 6
    """No gate failed, but of one the measurement could not tell: it is not passed."""
    NOTHING_MEASURED = 7
    """Nothing was wrong with what was asked for, and not one case could be timed."""
    UNTRUSTED_RESULT = 8
    """Something was found of a candidate that its numbers must not rest on (`model.integrity`)."""
    INTERNAL_ERROR = 70
    """An error in this program that it has no words for (EX_SOFTWARE of sysexits.h)."""
    INTERRUPTED = 130


class LabError(Exception):
    """An error with a message for the user: what was wrong, what was expected, what to do."""

    exit_code: ExitCode = ExitCode.USAGE


class UsageError(LabError):
    """Wrong arguments, an unreadable suite, an unwritable folder."""


class UnwritableError(UsageError):
    """A folder that could be written to when work began, and takes no more: nothing of what is measured is at fault."""


class NewerVersionError(UsageError):
    """A file or folder that a newer version of this program wrote."""


class MachineNotReadyError(LabError):
    exit_code = ExitCode.NOT_READY


class BuildFailedError(LabError):
    exit_code = ExitCode.BUILD_FAILED


EXPECTED = (LabError, InputError, DeviceError, BuildError, OSError)
"""Errors of a task that have words for a user. Any other is a defect of this program."""


def in_words(error: BaseException) -> tuple[str, ExitCode]:
    """One of `EXPECTED` in one line, and the exit code of its kind."""
    if isinstance(error, LabError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return name + (error.strerror or str(error)), ExitCode.USAGE
    if isinstance(error, DeviceError):
        return str(error), ExitCode.NOT_READY
    return str(error), ExitCode.BUILD_FAILED if isinstance(error, BuildError) else ExitCode.USAGE
