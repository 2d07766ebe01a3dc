"""Checks of files before they are read, and one message for each damaged file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.library_errors import first_line

AGAIN = "Delete this copy and get the file again."
LIMIT = "LIGHTNING_FCL_MAX_BYTES"
"""The environment variable that sets how many bytes a file may hold once read."""
_LEAST, _RATIO = 2_000_000_000, 20


@contextmanager
def reading(path: Path, what: str, remedy: str = AGAIN) -> Iterator[None]:
    """Let whatever a damaged file makes of its reader be one message, which says ``what`` it should be."""
    try:
        if path.exists() and not path.is_file():  # what is no file may never end
            raise ValueError(f"a {'folder' if path.is_dir() else 'device'}")
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"Expected the file {path} but it is missing.", hint=remedy, value=path) from error
    except MemoryError:  # the machine's want, not the file's
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, LimitError) else remedy
        raise DamagedFileError(
            f"Expected {path} {what} but got: {first_line(error)}.", hint=hint, value=path
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


def ensure(fits: object, otherwise: str) -> None:
    """Refuse what a file holds: within `reading`, whose message ends in what it is."""
    if not fits:
        raise ValueError(otherwise)


def check_size(size: int, packed: int = 0) -> None:
    """Refuse contents that claim to be larger than is plausible, before they are unpacked.

    That is above the larger of 2 GB and 20 times the file, or above the environment variable
    ``LIGHTNING_FCL_MAX_BYTES`` where it is set.
    """
    setting = os.environ.get(LIMIT)
    if setting and not setting.isdecimal():
        raise LimitError(f"{LIMIT}={setting}, which is no number of bytes", f"Set {LIMIT} to a whole number.")
    limit = int(setting) if setting else max(_LEAST, _RATIO * packed)
    if size > limit:
        hint = f"{AGAIN} If the file is meant to be that large, set {LIMIT} to at least {size}."
        raise LimitError(f"{size} bytes once read, above the limit of {limit}", hint)


def check_members(archive: ZipFile, packed: int) -> None:
    """Refuse a zip file by its directory: contents that are too large, or packed as nobody packs data."""
    members = archive.infolist()
    check_size(sum(member.file_size for member in members), packed)
    for member in members:
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise BadZipFile(f"{member.filename!r} packed by method {member.compress_type}")


def existing(path: Path, what: str, remedy: str) -> Path:
    """Return the path of a file. Raise MissingFileError if there is no such file."""
    if not path.is_file():
        raise MissingFileError(f"Expected {what}{path} but found no such file.", hint=remedy, value=path)
    return path


def read_json(path: Path, what: str, form: int, remedy: str) -> dict[str, Any]:
    """Return the content of a JSON file that this library has written.

    Raises:
        MissingFileError: If there is no such file.
        InvalidValueError: If the file is no JSON, or has another format.
    """
    try:
        content = json.loads(existing(path, what, remedy).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValueError(f"Expected {path} to hold JSON but got: {error}.", hint=remedy, value=path) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != form:
        raise InvalidValueError(
            f"Expected {path} to be of format {form} but it is of {'none' if found is None else found}: it is "
            "damaged, or another version of lightning-fcl wrote it.",
            hint=remedy,
            argument="format",
            value=found,
        )
    return dict(content)
