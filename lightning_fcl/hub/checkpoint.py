"""Checkpoints come in: from a file or from afar, verified, as tensors and plain values."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from lightning_fcl.errors import require
from lightning_fcl.hub.reading import check_members

_REMOTE = re.compile(r"(?P<url>\w+://[^#]*)(#sha256=(?P<digest>[0-9a-f]{64}))?", re.IGNORECASE)


def local_checkpoint(path: str | Path) -> Path:
    """The file of a checkpoint; one that is elsewhere is downloaded, verified and kept below ``~/.cache``.

    Args:
        path: A file, or ``https://host/name.ckpt#sha256=...`` with the 64 digits of its SHA-256.

    Raises:
        ValueError: If it is elsewhere and its SHA-256 is not told, or is another one.
        ConnectionError: If it cannot be downloaded.

    Example:
        >>> local_checkpoint("https://example.org/last.ckpt")
        Traceback (most recent call last):
        ValueError: Expected a checkpoint from afar to tell its SHA-256 but got https://example.org/last.ckpt. Append \
#sha256=... with its 64 digits, or download the file and look at it.
    """
    remote = _REMOTE.fullmatch(str(path))
    if remote is None:
        return Path(path)
    url, digest = remote["url"], remote["digest"]
    if not digest:
        raise ValueError(
            f"Expected a checkpoint from afar to tell its SHA-256 but got {path}. Append #sha256=... with its 64 "
            "digits, or download the file and look at it."
        )
    pooch = require("pooch", "downloads files and verifies them")
    try:
        folder = pooch.os_cache("lightning-fcl") / "checkpoints"
        kept = pooch.retrieve(url, f"sha256:{digest.lower()}", f"{digest.lower()}.ckpt", folder)
    except OSError as error:
        raise ConnectionError(
            f"Expected to download {url} but got: {error}. Try again, or download it by hand."
        ) from error
    except ValueError as error:
        raise ValueError(f"Expected to download {url} with its SHA-256 but: {error}") from error
    return Path(kept)


def read_checkpoint(read: Callable[[Path], Any], path: str | Path) -> dict[str, Any]:
    """A checkpoint, if it is a whole one of tensors and plain values.

    torch does not look at a file's checksums: a number that has changed on a disk would be loaded in silence.

    Args:
        read: Reads tensors and plain values from a file: `torch.load` with ``weights_only=True``.
        path: Where it is: see `local_checkpoint`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, holds other objects, or is no checkpoint. The newest whole one beside it is named.
    """
    file = local_checkpoint(path)
    if not file.exists():
        raise FileNotFoundError(f"Expected a checkpoint at {path} but there is none.{_instead(file)}")
    try:
        check_archive(file)
        checkpoint = read(file)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
            raise ValueError("it has no `state_dict`")
    except Exception as error:  # whatever a damaged file makes of its reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"Expected a whole checkpoint of tensors and plain values at {path} but could not read it ({reason})."
            f"{_instead(file)}"
        ) from error
    return checkpoint


def check_archive(file: Path) -> None:
    """Compare the checksums of everything in a zip file, unless it claims to be larger than is plausible.

    Raises:
        ValueError: If it does.
        BadZipFile: If it is none, is cut off, or something in it has another checksum.
    """
    with ZipFile(file) as archive:
        check_members(archive, file.stat().st_size)
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} has another checksum")


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder; None: there is none."""
    for path in sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            check_archive(path)
        except Exception:  # whatever a damaged file makes of its reader
            continue
        return path
    return None


def _instead(file: Path) -> str:
    """The end of a message about a checkpoint that cannot be used."""
    newest = newest_checkpoint(file.parent)
    return f" The newest whole one there is {newest}." if newest not in (None, file) else " Continue from another one."
