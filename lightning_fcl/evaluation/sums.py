"""Lists of files with their SHA-256, as pooch reads them: a line each, with the name and the digest."""

import re
from collections.abc import Mapping
from pathlib import Path

from lightning_fcl.evaluation.files import sha256, write_whole

_LINE = re.compile(r"(\S+) ([0-9a-f]{64})")


def read_sums(path: Path) -> dict[str, str]:
    """The SHA-256 of each file that a list names; the list needs none of its own: damage makes it another's."""
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    for line in lines:
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"Expected a file's name and its SHA-256 in each line of {path} but got {line[:100]!r}. Get it again."
            )
    return dict(line.split(" ") for line in lines)


def write_sums(path: Path, digests: Mapping[str, str]) -> Path:
    return write_whole(path, "".join(f"{name} {digests[name]}\n" for name in sorted(digests)))


def check_digest(path: Path, digest: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"Expected {path} but found no such file. Get it again.")
    if sha256(path) != digest:
        raise ValueError(
            f"Expected {path} to be as it was published but its checksum is another: it is damaged. Get it again."
        )
