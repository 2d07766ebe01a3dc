"""Archives of the publishers: downloaded once, verified, and unpacked whole or not at all."""

import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

__all__ = ["fetch_folder", "retrieve"]

_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


def fetch_folder(name: str, url: str, digest: str, archive: Path, folder: str) -> Path:
    """Download an archive, verify it, and unpack it beside itself.

    Args:
        name: Name of the data set.
        url: Where the archive is.
        digest: Its SHA-256, or another digest as in ``"md5:..."``.
        archive: Where it is put until it is unpacked, after which it is deleted: a ``.zip``, or a tar file.
        folder: The folder inside that is wanted.

    Returns:
        The unpacked folder, beside the archive.

    Raises:
        ConnectionError: If the download fails.
        ValueError: If what came is not the published file, which is deleted then.
        OSError: If it cannot be unpacked, for want of space for example; nothing is left of the attempt.

    Example:
        >>> fetch_folder("x", "https://x.org/x.zip", 64 * "0", Path("x/x.zip"), "x")  # doctest: +SKIP
        PosixPath('x/x')
    """
    retrieve(url, digest, archive, f" and run `lightning-fcl data fetch {name}` to unpack it")
    target = archive.parent / folder
    try:
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix="unpacking-") as scratch:
            _unpack(archive, scratch)
            (Path(scratch) / folder).rename(target)
    except _BROKEN as error:
        raise OSError(
            f"Expected to unpack {archive} to {target} but got: {error}. Make room there, or delete what is in the "
            f"way, and run `lightning-fcl data fetch {name}` again."
        ) from error
    archive.unlink()
    return target


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
    import pooch

    try:
        pooch.retrieve(url, known_hash=digest, path=path.parent, fname=path.name, progressbar=sys.stderr.isatty())
    except OSError as error:
        raise ConnectionError(
            f"Expected to download {url} but got: {error}. Try again, or download it by hand to {path}{then}."
        ) from error


def _unpack(archive: Path, folder: str) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as content:
            content.extractall(folder)  # strips what would lead out of the folder
    else:
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
