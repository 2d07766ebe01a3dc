"""Downloads that are verified, and archives that are unpacked whole or not at all."""

import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from lightning_fcl.errors import require

__all__ = ["retrieve", "unpack"]

_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


def retrieve(url: str, digest: str, path: Path, then: str = "") -> None:
    """Download a file and verify it; one that is there and verifies is not downloaded again.

    Args:
        url: Where the file is.
        digest: Its SHA-256, or another digest as in ``"md5:..."``.
        path: Where it is put.
        then: What to do after a download by hand, for the message.

    Raises:
        ConnectionError: If the download fails.
        ValueError: If what came is not the published file, which is deleted then.

    Example:
        >>> retrieve("https://x.org/x.zip", 64 * "0", Path("x/x.zip"))  # doctest: +SKIP
    """
    pooch = require("pooch", "downloads files and verifies them")
    try:
        pooch.retrieve(url, known_hash=digest, path=path.parent, fname=path.name, progressbar=sys.stderr.isatty())
    except OSError as error:
        raise ConnectionError(
            f"Expected to download {url} but got: {error}. Try again, or download it by hand to {path}{then}."
        ) from error


def unpack(archive: Path, folder: str, command: str) -> Path:
    """Unpack a folder of an archive beside it, and delete the archive.

    Args:
        archive: A ``.zip``, or a tar file.
        folder: The folder inside that is wanted.
        command: What to run for another attempt, for the message.

    Returns:
        The unpacked folder.

    Raises:
        OSError: If it cannot be unpacked, for want of space for example; nothing is left of the attempt.

    Example:
        >>> archive = Path(tempfile.mkdtemp()) / "x.zip"
        >>> zipfile.ZipFile(archive, "w").writestr("x/1.txt", "one")
        >>> [path.name for path in unpack(archive, "x", "`fetch x`").iterdir()], archive.exists()
        (['1.txt'], False)
    """
    target = archive.parent / folder
    try:
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix="unpacking-") as scratch:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as content:
                    content.extractall(scratch)  # strips what would lead out of the folder
            else:
                with tarfile.open(archive) as content:
                    content.extractall(scratch, filter="data")
            (Path(scratch) / folder).rename(target)
    except _BROKEN as error:
        raise OSError(
            f"Expected to unpack {archive} to {target} but got: {error}. Make room there, or delete what is in the "
            f"way, and run {command} again."
        ) from error
    archive.unlink()
    return target
