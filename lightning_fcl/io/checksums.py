"""SHA-256 checksums of files, and files that list checksums."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import REDOWNLOAD_HINT, open_file, read_text, require_file

_SUM = re.compile(r"(\S+) ([0-9a-f]{64})")


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file as 64 hexadecimal digits."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checksums(path: Path) -> dict[str, str]:
    """Read a list of checksums. Return the SHA-256 checksum of each listed file, by file name.

    The listed files are not read. If the list itself is damaged, this function raises an error, or the returned
    checksums do not match the files.
    """
    lines = read_text(path, errors="replace").removesuffix("\n").split("\n")
    for line in lines:
        if not _SUM.fullmatch(line):
            raise InvalidValueError(
                f"Expected a file name and its SHA-256 checksum in each line of {path}, but got {line[:100]!r}.",
                hint=REDOWNLOAD_HINT,
                value=path,
            )
    return dict(line.split(" ") for line in lines)


def write_checksums(path: Path, digests: Mapping[str, str]) -> Path:
    """Write a list of SHA-256 checksums, sorted by file name. Return the path of the list."""
    return write_atomic(path, "".join(f"{name} {digests[name]}\n" for name in sorted(digests)))


def check_digest(path: Path, digest: str) -> None:
    """Raise InvalidValueError if the SHA-256 checksum of a file differs from ``digest``."""
    if sha256(require_file(path, "", "Get the file again.")) != digest:
        raise InvalidValueError(
            f"Expected {path} to match its published checksum, but the checksum differs. The file is damaged.",
            hint=REDOWNLOAD_HINT,
            value=path,
        )
