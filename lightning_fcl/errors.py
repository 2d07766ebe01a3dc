"""Errors that the library raises: the expected value, the actual value, and a hint on how to fix the error."""

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
    """An argument, a file or a message has an invalid value."""

    code = "invalid-value"


class UnknownNameError(InvalidValueError):
    """A name is not one of the known names."""

    code = "unknown-name"


class MissingValueError(InvalidValueError):
    """A required value is missing."""

    code = "missing-value"


class DamagedFileError(InvalidValueError):
    """A file has invalid content."""

    code = "damaged-file"


class InvalidTypeError(LightningFCLError, TypeError):
    """The type of an argument does not match its annotation."""

    code = "invalid-type"


class InvalidStateError(LightningFCLError, RuntimeError):
    """A call is not possible in the current state."""

    code = "invalid-state"


class MissingFileError(LightningFCLError, FileNotFoundError):
    """A file or folder does not exist."""

    code = "missing-file"


class FileAccessError(LightningFCLError, OSError):
    """The operating system does not allow reading or writing a file."""

    code = "file-access"


class FileConflictError(LightningFCLError, FileExistsError):
    """A file or folder to be written already exists with other content."""

    code = "file-conflict"


class DiskFullError(FileAccessError):
    """The disk is full, or the disk quota is reached."""

    code = "no-room"


class ConnectionFailedError(LightningFCLError, ConnectionError):
    """A download or an upload failed."""

    code = "connection-failed"


class MissingPackageError(LightningFCLError, ModuleNotFoundError):
    """A required package is not installed."""

    code = "missing-package"
