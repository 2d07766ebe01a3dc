"""Errors that the library raises. A message contains the expected value, the actual value, and often a hint."""

from __future__ import annotations


class LightningFCLError(Exception):
    """Base class of all errors of this library. Each subclass also derives from the matching built-in class.

    Args:
        message: The expected value and the actual value.
        hint: How to fix the error, in full sentences. The text of the error is the message followed by the hint.
        argument: Name of the invalid argument, option or field.
        value: The actual value. If a file is missing, damaged or unusable, the path of the file.
        code: Identifier of the kind of error, for programs. Defaults to the code of the class.

    Example:
        >>> error = InvalidValueError("Expected `lr` to be above 0 but got 0.", hint="Use `lr=0.1`.", argument="lr")
        >>> print(error)
        Expected `lr` to be above 0 but got 0. Use `lr=0.1`.
        >>> error.code, error.argument, isinstance(error, ValueError)
        ('invalid-value', 'lr', True)
    """

    code = "error"

    def __init__(
        self, message: str, *, hint: str = "", argument: str | None = None, value: object = None, code: str = ""
    ) -> None:
        self.hint = hint.strip()
        self.argument, self.value = argument, value
        if code:
            self.code = code
        super().__init__(f"{message} {self.hint}" if self.hint else message)


class InvalidValueError(LightningFCLError, ValueError):
    """An error for an invalid value of an argument, a file or a message."""

    code = "invalid-value"


class UnknownNameError(InvalidValueError):
    """An error for a name that is not one of the known names."""

    code = "unknown-name"


class MissingValueError(InvalidValueError):
    """An error for a missing required value."""

    code = "missing-value"


class DamagedFileError(InvalidValueError):
    """An error for a file with invalid content."""

    code = "damaged-file"


class InvalidTypeError(LightningFCLError, TypeError):
    """An error for a value of an invalid type."""

    code = "invalid-type"


class InvalidStateError(LightningFCLError, RuntimeError):
    """An error for a call that is not possible in the current state."""

    code = "invalid-state"


class MissingFileError(LightningFCLError, FileNotFoundError):
    """An error for a file or folder that does not exist."""

    code = "missing-file"


class FileAccessError(LightningFCLError, OSError):
    """An error for a file that cannot be read or written, for example without permission."""

    code = "file-access"


class FileConflictError(LightningFCLError, FileExistsError):
    """An error for writing a file or folder that already exists with other content."""

    code = "file-conflict"


class DiskFullError(FileAccessError):
    """An error for a full disk or a reached disk quota."""

    code = "no-room"


class ConnectionFailedError(LightningFCLError, ConnectionError):
    """An error for a failed download or upload, or for a lost connection to another process or server."""

    code = "connection-failed"


class MissingPackageError(LightningFCLError, ModuleNotFoundError):
    """An error for a required package that is not installed."""

    code = "missing-package"
