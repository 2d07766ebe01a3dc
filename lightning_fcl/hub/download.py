"""Files come from afar: verified, resumed where they stopped, whole or not at all, by one process at a time."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import sha256

ATTEMPTS = 4
"""How often a connection that breaks is made again."""

_PIECE = 1 << 16
_TIMEOUT = (10, 30)  # seconds: to connect, and between two pieces


def is_offline() -> bool:
    """Whether nothing may be asked of others: ``LIGHTNING_FCL_OFFLINE`` or ``HF_HUB_OFFLINE`` is set."""
    wanted = (os.environ.get(name, "") for name in ("LIGHTNING_FCL_OFFLINE", "HF_HUB_OFFLINE"))
    return any(value.lower() not in ("", "0", "false", "no") for value in wanted)


def download(url: str, path: Path, digest: str, size: int | None = None, wait: float = 1.0) -> Path:
    """The file of a URL, if it is the one whose SHA-256 is known; one that is there already is not asked for again.

    What an attempt that broke has brought is kept beside it, and the next one goes on from there.

    Args:
        url: ``https://...`` or ``http://...``.
        path: Where it goes.
        digest: Its SHA-256, 64 digits.
        size: Its bytes, where they are known: no more are taken.
        wait: Seconds before the second attempt; each later one waits twice as long.

    Raises:
        ValueError: If what comes is another file; nothing of it is kept.
        ConnectionError: If it cannot be had, or nothing may be asked for (see `is_offline`).
    """
    filelock = require("filelock", "lets one process download at a time; torch brings it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        if path.is_file():
            if sha256(path) == digest:
                return path
            path.unlink()
        if is_offline():
            raise ConnectionError(
                f"Expected {path} to be there, as nothing is downloaded in offline mode, but it is not. Unset "
                f"LIGHTNING_FCL_OFFLINE and HF_HUB_OFFLINE, or put {url} there."
            )
        partial = path.with_name(f".{path.name}.part")
        resumed = partial.exists()
        _retrying(lambda: _append(url, partial, size), url, path, wait)
        if resumed and sha256(partial) != digest:  # what was there was of another file
            partial.unlink()
            _retrying(lambda: _append(url, partial, size), url, path, wait)
        if (found := sha256(partial)) != digest:
            partial.unlink()
            raise ValueError(
                f"Expected the file of SHA-256 {digest} from {url} but got one of {found}. Nothing of it is kept. Ask "
                "its publisher, or name the registry that it belongs to."
            )
        os.replace(partial, path)
    return path


class _RefusedError(Exception):
    """The host does not have it: asking again is of no use."""


def _retrying(ask: Callable[[], None], url: str, path: Path, wait: float) -> None:
    requests = require("requests", "downloads files")
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except (OSError, requests.RequestException, _RefusedError) as error:
            if attempt + 1 < ATTEMPTS and not isinstance(error, _RefusedError):
                time.sleep(wait * 2**attempt)
                continue
            raise ConnectionError(
                f"Expected to download {url} but got: {error}. Try again, or download it by hand to {path}."
            ) from error


def _append(url: str, partial: Path, size: int | None) -> None:
    """Bring what is missing of a file."""
    requests = require("requests", "downloads files")
    have = partial.stat().st_size if partial.exists() else 0
    if have and size is not None and have >= size:
        if have == size:
            return
        have = 0
    header = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, stream=True, timeout=_TIMEOUT, headers=header) as answer:
        if answer.status_code == 416:  # there is no more: what is here is whole, or another file's
            if size is None or have == size:
                return
            partial.unlink()
            raise OSError("the part that is here is not of this file; it begins anew")
        _check(answer.status_code, url)
        resumes = have and answer.status_code == 206
        total = int(answer.headers.get("Content-Length", 0)) + (have if resumes else 0)
        with partial.open("ab" if resumes else "wb") as file, _bar(url, total, have if resumes else 0) as bar:
            for piece in answer.iter_content(_PIECE):
                file.write(piece)
                bar.update(len(piece))
                if size is not None and file.tell() > size:
                    break
    if (got := partial.stat().st_size) < (size if size is not None else total):
        raise OSError(f"the connection ended after {got} bytes of {size if size is not None else total}")


def _check(status: int, url: str) -> None:
    if status in (200, 206):
        return
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise _RefusedError(f"HTTP status {status}")
    raise OSError(f"HTTP status {status}")


def _bar(url: str, total: int, initial: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    return tqdm(total=total or None, initial=initial, unit="B", unit_scale=True, desc=Path(url).name, disable=quiet)
