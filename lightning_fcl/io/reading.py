"""Functions that check files before reading them, and that report damaged files as one kind of error."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.library_errors import first_line

REDOWNLOAD_HINT = "Delete this copy and get the file again."
LIMIT = "LIGHTNING_FCL_MAX_BYTES"
"""Name of the environment variable with the maximum size in bytes of a file's content, after decompression."""
_LEAST, _RATIO = 2_000_000_000, 20
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_PIECE = 2**20
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading in binary mode.

    The kind of the file is checked after opening, on the descriptor. Opening a named pipe or a device does not block.

    Raises:
        InvalidValueError: If the path is a folder, a named pipe, a socket or a device.
        OSError: If there is no file, or if the file cannot be opened.
    """
    return open(path, "rb", opener=_open_regular)


def regular_file(path: Path) -> Path:
    """Return a path if it is a readable regular file, for a library that opens files by path.

    Raises:
        InvalidValueError: If the path is a folder, a named pipe, a socket or a device.
        OSError: If there is no file, or if the file cannot be opened.
    """
    open_file(path).close()
    return path


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: Path of the file.
        max_bytes: Maximum size of the file in bytes. By default, the limit of `check_size`.

    Raises:
        InvalidValueError: If the file is too large or is not a regular file.
        OSError: If there is no file, or if the file cannot be opened.
    """
    with open_file(path) as file:
        size, num_bytes, pieces = os.fstat(file.fileno()).st_size, 0, list[bytes]()
        try:
            check_size(size, max_bytes=max_bytes)
            while piece := file.read(_PIECE):
                pieces.append(piece)
                num_bytes += len(piece)
                check_size(num_bytes, max_bytes=max_bytes)  # the file may grow while it is read
        except LimitSettingError:
            raise
        except ValueError as error:
            hint = error.hint if isinstance(error, LimitError) else "Use a smaller file."
            raise InvalidValueError(
                f"Expected {path} to be within the size limit, but got {error}.", hint=hint, value=path
            ) from error
    return b"".join(pieces)


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict", max_bytes: int | None = None) -> str:
    """Return the text of a regular file. Line ends are converted to line feeds."""
    text = read_bytes(path, max_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _FLAGS)
    if other := _other_kind(os.fstat(descriptor)):
        os.close(descriptor)
        raise InvalidValueError(
            f"Expected {path} to be a regular file, but got {other}.",
            hint="Pass the path of a regular file.",
            value=Path(path),
        )
    return descriptor


def _other_kind(file_status: os.stat_result) -> str:
    """Return the kind of a file that is not regular, such as "a folder". Return "" for a regular file."""
    return "" if stat.S_ISREG(file_status.st_mode) else _KINDS.get(stat.S_IFMT(file_status.st_mode), "a device")


@contextmanager
def as_file_error(path: Path, description: str, remedy: str = REDOWNLOAD_HINT) -> Iterator[None]:
    """Convert every error of a reader, except MemoryError and LimitSettingError, to an error that names the file.

    Args:
        path: Path of the file.
        description: Expected content, as a verb phrase such as "to be a CSV file". The message starts with
            "Expected", the path and this phrase.
        remedy: Hint on how to fix the error.

    Raises:
        MissingFileError: If the file is missing.
        LimitSettingError: If the environment variable with the size limit is invalid.
        DamagedFileError: If the reader raises another error.
    """
    try:
        if path.exists() and not path.is_file():
            # A path inside a zip file is not a `Path` and has no `stat`.
            raise ValueError(_other_kind(path.stat()) if isinstance(path, Path) else "a folder")
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"Expected the file {path} but it is missing.", hint=remedy, value=path) from error
    except (MemoryError, LimitSettingError):  # the memory or the setting is the cause, and the file is not damaged
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, LimitError) else remedy
        raise DamagedFileError(
            f"Expected {path} {description} but got: {first_line(error)}.", hint=hint, value=path
        ) from error


class LimitError(ValueError):
    """An error for content of a file that exceeds a limit that the user can raise.

    Args:
        message: Size of the content and the limit.
        hint: How to raise the limit.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class LimitSettingError(InvalidValueError):
    """An error for a value of ``LIGHTNING_FCL_MAX_BYTES`` that is not a number of bytes."""


def check(condition: object, message: str) -> None:
    """Raise ValueError if the content of a file does not meet a condition.

    Args:
        condition: Value that is true if the content meets the condition.
        message: Description of the actual content. `as_file_error` writes it after "got:".
    """
    if not condition:
        raise ValueError(message)


def check_size(size: int, packed: int = 0, max_bytes: int | None = None) -> None:
    """Raise LimitError or ValueError if the content of a file is larger than the limit.

    The limit is ``max_bytes`` if given, otherwise the value of the environment variable ``LIGHTNING_FCL_MAX_BYTES``. If
    neither is set, the limit is the larger of 2 GB and 20 times the packed size. Raise LimitSettingError if the value
    of the environment variable is not a number.

    Args:
        size: Size of the content in bytes, after decompression.
        packed: Size of the compressed file in bytes. 0: the file is not compressed.
        max_bytes: Maximum size in bytes.
    """
    if max_bytes is not None:
        check(size <= max_bytes, f"{size} bytes, above the limit of {max_bytes}")
        return
    setting = os.environ.get(LIMIT)
    if setting and not setting.isdecimal():
        raise LimitSettingError(
            f"Expected the environment variable {LIMIT} to be a number of bytes, but got `{setting}`.",
            hint=f"Set {LIMIT} to a whole number.",
            argument=LIMIT,
            value=setting,
        )
    limit = int(setting) if setting else max(_LEAST, _RATIO * packed)
    if size > limit:
        hint = f"{REDOWNLOAD_HINT} If the file is meant to be that large, set {LIMIT} to at least {size}."
        raise LimitError(f"content of up to {size} bytes, above the limit of {limit}", hint)


def check_members(archive: ZipFile, packed: int) -> None:
    """Raise ValueError if the content of a zip file is too large, or BadZipFile if its compression is unsupported.

    Only the list of files in the zip file is read. The files are not unpacked.
    """
    members = archive.infolist()
    check_size(sum(member.file_size for member in members), packed)
    for member in members:
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise BadZipFile(f"{member.filename!r} is packed by the unsupported method {member.compress_type}")


def require_file(path: Path, description: str, remedy: str) -> Path:
    """Return the path of a file, or raise MissingFileError if there is no such file.

    Args:
        path: Path of the file.
        description: Description of the file before its path in the message, with a space at the end, or "".
        remedy: Hint on how to fix the error.
    """
    if not path.is_file():
        raise MissingFileError(f"Expected {description}{path} but found no such file.", hint=remedy, value=path)
    return path


def read_note(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that can be generated again, or {} if the file is missing or damaged."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: Path, description: str, schema: int, remedy: str) -> dict[str, Any]:
    """Return the content of a JSON file that this library has written.

    Args:
        path: Path of the file.
        description: Description of the file for messages, see `require_file`.
        schema: Expected number in the field ``format`` of the content.
        remedy: Hint on how to fix the error.

    Raises:
        MissingFileError: If there is no such file.
        InvalidValueError: If the file is too large, the content is not JSON, or the format number differs.
    """
    try:
        content = json.loads(read_text(require_file(path, description, remedy)))
    except InvalidValueError:
        raise
    except ValueError as error:
        raise InvalidValueError(
            f"Expected {path} to contain JSON but got: {error}.", hint=remedy, value=path
        ) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != schema:
        raise InvalidValueError(
            f"Expected {path} to have format {schema}, but it has "
            f"{'no format' if version is None else f'format {version}'}: the file is damaged, or another version of "
            "lightning-fcl wrote it.",
            hint=remedy,
            argument="format",
            value=version,
        )
    return dict(content)
