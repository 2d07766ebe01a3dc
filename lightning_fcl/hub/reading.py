"""Files that others made are read within limits, and each damage ends in one message with the file's name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

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
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {remedy}") from error
    except MemoryError:  # the machine's want, not the file's
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"Expected {path} {what} but got: {reason}. {remedy}") from error


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
        raise ValueError(f"{LIMIT}={setting}, which is no number of bytes")
    limit = int(setting) if setting else max(_LEAST, _RATIO * packed)
    if size > limit:
        raise ValueError(f"{size} bytes once read, above the limit of {limit} (set {LIMIT} to raise it)")


def check_members(archive: ZipFile, packed: int) -> None:
    """Refuse a zip file by its directory: contents that are too large, or packed as nobody packs data."""
    members = archive.infolist()
    check_size(sum(member.file_size for member in members), packed)
    for member in members:
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise BadZipFile(f"{member.filename!r} packed by method {member.compress_type}")
