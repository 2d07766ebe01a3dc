"""Checks of files before they are read, and one message for each damaged file."""

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
"""The environment variable that sets how many bytes a file may hold once read."""
_LEAST, _RATIO = 2_000_000_000, 20
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_PIECE = 2**20
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading in binary mode.

    The kind of the file is checked on the descriptor that is read. A named pipe or a device does not block.

    Raises:
        InvalidValueError: If the path is a folder, a named pipe, a socket or a device.
        OSError: If there is no file, or if the file cannot be opened.
    """
    return open(path, "rb", opener=_open_regular)


def regular_file(path: Path) -> Path:
    """Return the path of a regular file for a library that opens the file by its path.

    Raises:
        InvalidValueError: If the path is a folder, a named pipe, a socket or a device.
        OSError: If there is no file, or if the file cannot be opened.
    """
    open_file(path).close()
    return path


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file of at most ``max_bytes`` bytes, by default the limit of `check_size`."""
    with open_file(path) as file:
        size, num_bytes, pieces = os.fstat(file.fileno()).st_size, 0, list[bytes]()
        try:
            check_size(size, max_bytes=max_bytes)
            while piece := file.read(_PIECE):
                pieces.append(piece)
                num_bytes += len(piece)
                check_size(num_bytes, max_bytes=max_bytes)  # the file may grow while it is read
        except ValueError as error:
            hint = error.hint if isinstance(error, LimitError) else "Use a smaller file."
            raise InvalidValueError(
                f"Expected {path} to be a smaller file, but got {error}.", hint=hint, value=path
            ) from error
    return b"".join(pieces)


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict", max_bytes: int | None = None) -> str:
    """Return the text of a regular file, with line feeds at the ends of lines."""
    text = read_bytes(path, max_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _FLAGS)
    if other := _other_kind(os.fstat(descriptor)):
        os.close(descriptor)
        raise InvalidValueError(
            f"Expected {path} to be a regular file, but got {other}.", hint="Name a regular file.", value=Path(path)
        )
    return descriptor


def _other_kind(file_status: os.stat_result) -> str:
    """Return the kind of a file that is not regular, or ""."""
    return "" if stat.S_ISREG(file_status.st_mode) else _KINDS.get(stat.S_IFMT(file_status.st_mode), "a device")


@contextmanager
def as_file_error(path: Path, description: str, remedy: str = REDOWNLOAD_HINT) -> Iterator[None]:
    """Convert any error of a reader to one error that names the file and ``description`` the file should be."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(_other_kind(path.stat()) if isinstance(path, Path) else "a folder")  # or in a zip file
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"Expected the file {path} but it is missing.", hint=remedy, value=path) from error
    except MemoryError:  # the machine's want, not the file's
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, LimitError) else remedy
        raise DamagedFileError(
            f"Expected {path} {description} but got: {first_line(error)}.", hint=hint, value=path
        ) from error


class LimitError(ValueError):
    """Content of a file that exceeds a limit which the user can raise.

    Args:
        message: The content and the limit.
        hint: How to raise the limit.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check(condition: object, message: str) -> None:
    """Refuse what a file holds: within `as_file_error`, whose message ends in what it is."""
    if not condition:
        raise ValueError(message)


def check_size(size: int, packed: int = 0, max_bytes: int | None = None) -> None:
    """Raise ValueError if a content is larger than the limit.

    The limit is ``max_bytes``. Otherwise, the limit is the environment variable ``LIGHTNING_FCL_MAX_BYTES``, or the
    larger of 2 GB and 20 times the packed size.
    """
    if max_bytes is not None:
        check(size <= max_bytes, f"{size} bytes, above the limit of {max_bytes}")
        return
    setting = os.environ.get(LIMIT)
    if setting and not setting.isdecimal():
        raise LimitError(f"{LIMIT}={setting}, which is no number of bytes", f"Set {LIMIT} to a whole number.")
    limit = int(setting) if setting else max(_LEAST, _RATIO * packed)
    if size > limit:
        hint = f"{REDOWNLOAD_HINT} If the file is meant to be that large, set {LIMIT} to at least {size}."
        raise LimitError(f"{size} bytes once read, above the limit of {limit}", hint)


def check_members(archive: ZipFile, packed: int) -> None:
    """Refuse a zip file by its directory: contents that are too large, or packed as nobody packs data."""
    members = archive.infolist()
    check_size(sum(member.file_size for member in members), packed)
    for member in members:
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise BadZipFile(f"{member.filename!r} packed by method {member.compress_type}")


def require_file(path: Path, description: str, remedy: str) -> Path:
    """Return the path of a file. Raise MissingFileError if there is no such file."""
    if not path.is_file():
        raise MissingFileError(f"Expected {description}{path} but found no such file.", hint=remedy, value=path)
    return path


def read_note(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that can be made again, or {} if the file is missing or damaged."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: Path, description: str, schema: int, remedy: str) -> dict[str, Any]:
    """Return the content of a JSON file that this library has written.

    Raises:
        MissingFileError: If there is no such file.
        InvalidValueError: If the file is no JSON, or has another format.
    """
    try:
        content = json.loads(read_text(require_file(path, description, remedy)))
    except ValueError as error:
        raise InvalidValueError(f"Expected {path} to hold JSON but got: {error}.", hint=remedy, value=path) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != schema:
        raise InvalidValueError(
            f"Expected {path} to be of format {schema} but it is of {'none' if version is None else version}: it is "
            "damaged, or another version of lightning-fcl wrote it.",
            hint=remedy,
            argument="format",
            value=version,
        )
    return dict(content)
