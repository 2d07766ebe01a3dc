"""SHA-256 checksums of many files, cached by path, size and times so that unchanged files are not read again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.checksums import sha256
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import read_bytes

SETTLED_NANOSECONDS = 3_000_000_000
"""Minimum age in nanoseconds of a file whose checksum is cached.

A file that was changed less than this time before its checksum can change again without a new time. File systems store
times with a resolution of up to 2 s.
"""

_THREADS = 8
_DIGEST = re.compile("[0-9a-f]{64}")


class _Entry(NamedTuple):
    """A cached checksum, with the size and the times of the file before the file was read.

    The time of the last change of the inode (`changed_ns`) detects a file that was replaced with an equal size and an
    equal modification time.
    """

    size: int
    modified_ns: int
    changed_ns: int
    digest: str

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether the file is unchanged since the checksum was computed."""
        return self[:3] == (status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 checksum of each file in a folder, as 64 hexadecimal digits, by name.

    The folder ``checksums`` of the cache folder contains a file of checksums for each ``folder``. A file is read only
    if its size, its modification time or its path changed since the last call. A damaged cache is ignored. If the cache
    cannot be written, later calls read the files again. Several processes can call this function at the same time.

    Args:
        folder: The folder.
        names: Paths of the files relative to the folder, with ``/`` between the parts.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a path is not a regular file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "empty.png").write_bytes(b"")
        ...     file_digests(Path(folder), ["empty.png"])["empty.png"][:8]
        'e3b0c442'
    """
    started = time.time_ns()
    folder = folder.absolute()
    statuses = {name: (folder / name).stat() for name in names}
    cache = _cache_path(folder)
    cached_entries = {} if cache is None else _read_cache(cache)
    result = {
        name: cached_entries[name].digest
        for name, status in statuses.items()
        if name in cached_entries and cached_entries[name].is_of(status)
    }
    missing = [name for name in statuses if name not in result]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: sha256(folder / name), missing)
        bar = tqdm(digests, total=len(missing), unit="file", desc="checksums", disable=None, delay=2)
        result |= dict(zip(missing, bar, strict=True))
    entries = {
        name: _Entry(status.st_size, status.st_mtime_ns, status.st_ctime_ns, result[name])
        for name, status in statuses.items()
        if max(status.st_mtime_ns, status.st_ctime_ns) < started - SETTLED_NANOSECONDS
    }
    if cache is not None and any(cached_entries.get(name) != entry for name, entry in entries.items()):
        other_entries = {
            name: entry for name, entry in cached_entries.items() if name not in statuses and (folder / name).is_file()
        }
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            _write_cache(cache, {**other_entries, **entries})
    return {name: result[name] for name in statuses}


def _cache_path(folder: Path) -> Path | None:
    """Return the path of the file that caches the checksums of a folder. None if the user has no home directory."""
    try:
        return cache_folder() / "checksums" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json"
    except RuntimeError:
        return None


def _read_cache(path: Path) -> dict[str, _Entry]:
    """Return the cached checksums by name. The result is empty if the file is missing or damaged."""
    try:
        digest, _, content = read_bytes(path).partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            return {}
        return {name: _parse(entry) for name, entry in json.loads(content).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _parse(entry: list[object]) -> _Entry:
    size, modified_ns, changed_ns, digest = entry
    if not isinstance(size, int) or not isinstance(modified_ns, int) or not isinstance(changed_ns, int):
        raise ValueError("the size or a time is not a number")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("the checksum is invalid")
    return _Entry(size, modified_ns, changed_ns, digest)


def _write_cache(path: Path, entries: Mapping[str, _Entry]) -> None:
    """Write the checksums as JSON, after a line with the checksum of this JSON."""
    content = json.dumps(entries, separators=(",", ":")).encode()
    write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, sync=False)
