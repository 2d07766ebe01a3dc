"""The errors that the library raises on purpose: what was expected, what was found, and how to fix it."""

from __future__ import annotations


class LightningFCLError(Exception):
    """An error that the library raises on purpose. Its classes also derive from the built-in class of their kind.

    Args:
        message: What was expected and what was found instead.
        hint: What to do about it, in sentences. The text of the error is the message followed by the hint.
        argument: Name of the argument, option or field that is wrong.
        value: What was found instead. For a file that is missing, damaged or not usable, its path.
        code: Kind of the error, for programs. The default is that of the class.

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
    """An argument, a file or a message has a value that cannot be used."""

    code = "invalid-value"


class UnknownNameError(InvalidValueError):
    """A name is none of those that exist."""

    code = "unknown-name"


class MissingValueError(InvalidValueError):
    """Something that is needed was not given."""

    code = "missing-value"


class DamagedFileError(InvalidValueError):
    """A file does not hold what it should."""

    code = "damaged-file"


class InvalidTypeError(LightningFCLError, TypeError):
    """An argument has a value of another type than its annotation says."""

    code = "invalid-type"


class InvalidStateError(LightningFCLError, RuntimeError):
    """Something is called at a time, or in a place, where it cannot work."""

    code = "invalid-state"


class MissingFileError(LightningFCLError, FileNotFoundError):
    """A file or folder does not exist."""

    code = "missing-file"


class FileAccessError(LightningFCLError, OSError):
    """The operating system refuses to read or write a file."""

    code = "file-access"


class FileConflictError(LightningFCLError, FileExistsError):
    """A file or folder that would be written exists already, with other content."""

    code = "file-conflict"


class DiskFullError(FileAccessError):
    """A disk is full, or a quota reached."""

    code = "no-room"


class ConnectionFailedError(LightningFCLError, ConnectionError):
    """A download or an upload has failed."""

    code = "connection-failed"


class MissingPackageError(LightningFCLError, ModuleNotFoundError):
    """A package that is needed is not installed."""

    code = "missing-package"
