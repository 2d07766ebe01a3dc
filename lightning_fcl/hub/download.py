"""Files come from afar: verified, resumed where they stopped, whole or not at all, by one process at a time."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import locked, sha256, writing

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

    What an attempt that broke has brought is kept beside it, and the next one goes on from there. A file that is
    there and is another stays until this one has come, whole.

    Args:
        wait: Seconds before the second attempt; each later one waits twice as long.
    """
    with writing(path, size, "try again"):
        if _fits(path, digest):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            if not _fits(path, digest):  # another process may have brought it meanwhile
                _bring(url, path, digest, size, wait)
    return path


def _fits(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _bring(url: str, path: Path, digest: str, size: int | None, wait: float) -> None:
    if is_offline():
        raise ConnectionError(
            f"Expected {path} to be there, as nothing is downloaded in offline mode, but it is not. Unset "
            f"LIGHTNING_FCL_OFFLINE and HF_HUB_OFFLINE, or put {url} there."
        )
    partial = path.with_name(f".{path.name}.part")
    if partial.is_symlink():  # it would be written to elsewhere
        partial.unlink()
    resumed = partial.exists()
    _retrying(lambda: _append(url, partial, size), url, path, wait)
    if resumed and sha256(partial) != digest:  # what was there was of another file
        partial.unlink()
        _retrying(lambda: _append(url, partial, size), url, path, wait)
    if (found := sha256(partial)) != digest:
        partial.unlink()
        raise ValueError(
            f"Expected the file of SHA-256 {digest} from {url} but got one of {found}. Nothing of it is kept. Ask "
            "its publisher for it, or for the SHA-256 that it has now."
        )
    os.replace(partial, path)


class _BrokenError(Exception):
    """The connection broke: asking again may help."""


class _RefusedError(Exception):
    """The host does not have it: asking again is of no use."""


def _retrying(ask: Callable[[], None], url: str, path: Path, wait: float) -> None:
    requests = require("requests", "downloads files")
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except (requests.RequestException, _BrokenError, _RefusedError) as error:
            if attempt + 1 < ATTEMPTS and not isinstance(error, _RefusedError | ValueError):  # no URL, for example
                time.sleep(wait * 2**attempt)
                continue
            raise ConnectionError(
                f"Expected to download {url} but got: {error}. Try again, or download it by hand to {path}."
            ) from error


def _append(url: str, partial: Path, size: int | None) -> None:
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
            raise _BrokenError("the part that is here is not of this file; it begins anew")
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
        raise _BrokenError(f"the connection ended after {got} bytes of {size if size is not None else total}")


def _check(status: int, url: str) -> None:
    if status in (200, 206):
        return
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise _RefusedError(f"HTTP status {status}")
    raise _BrokenError(f"HTTP status {status}")


def _bar(url: str, total: int, initial: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    return tqdm(total=total or None, initial=initial, unit="B", unit_scale=True, desc=Path(url).name, disable=quiet)
