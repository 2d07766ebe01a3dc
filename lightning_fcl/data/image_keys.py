"""Checksums of the images of public datasets, cached by the state of the source files.

A later run finds the checksum without reading the images. The folder ``image-keys`` of the cache folder contains a file
for each state of the source files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_fcl.data.datasets import readers
from lightning_fcl.data.samples import DatasetSpec
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.file_digests import SETTLED_NANOSECONDS
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import read_bytes

_KEY = re.compile("[0-9a-f]{64}")


def key_file(data: str | DatasetSpec) -> Path | None:
    """Return the path of the file that contains the checksum of a dataset's images. The file may be missing.

    The name of the file is a hash of the name and options of the dataset, and of the path, size and times of each
    source file. It also covers the code that loads datasets, and the version of Pillow, which resizes images.

    Returns:
        The path. None if a source file was changed less than 3 s ago, because the file can change again without a new
        time. Also None if the dataset is unknown, a source file cannot be read, or the user has no home directory.
    """
    spec = DatasetSpec(data) if isinstance(data, str) else data
    started = time.time_ns()
    parts = [spec.name, json.dumps(spec.options, sort_keys=True, default=repr), _pillow_version()]
    try:
        layout, location = readers.SOURCES[spec.name].find(spec.root)
        parts.append(layout)
        for path in _files_in(location):
            status = path.stat()
            if max(status.st_mtime_ns, status.st_ctime_ns) >= started - SETTLED_NANOSECONDS:
                return None
            parts.append(f"{path.absolute()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        parts += [
            hashlib.sha256(read_bytes(path)).hexdigest() for path in _files_in(Path(readers.__file__).parent, ".py")
        ]
        folder = cache_folder()
    except (OSError, ValueError, KeyError, RuntimeError):
        return None
    return folder / "image-keys" / hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:32]


def read_key(path: Path) -> str:
    """Return the checksum in a file of `key_file`. Empty if the file is missing or damaged."""
    try:
        key = read_bytes(path).decode()
    except (OSError, ValueError):
        return ""
    return key if _KEY.fullmatch(key) else ""


def write_key(path: Path, key: str) -> None:
    """Write a checksum to a file of `key_file`. If the file cannot be written, later runs read the images again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, key, sync=False)


def _files_in(location: Path, suffix: str = "") -> Iterator[Path]:
    """Yield a file itself, or all files in a folder and its subfolders, in a fixed order."""
    if location.is_file():
        yield location
        return
    for folder, subfolders, names in os.walk(location):
        subfolders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix))


def _pillow_version() -> str:
    try:
        return importlib.metadata.version("pillow")
    except importlib.metadata.PackageNotFoundError:
        return ""
