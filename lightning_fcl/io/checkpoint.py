"""Checkpoints come in: from a file or from afar, verified, as tensors and plain values."""

import os
import pickletools
import re
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.io.download import download
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import LimitError, check_members, open_file
from lightning_fcl.library_errors import first_line
from lightning_fcl.validation import format_names

_REMOTE = re.compile(r"(?P<url>\w+://[^#]*)(#sha256=(?P<digest>[0-9a-f]{64}))?", re.IGNORECASE)


def resolve_checkpoint(path: str | Path) -> Path:
    """The file of a checkpoint; ``https://host/name.ckpt#sha256=...`` is downloaded, verified and kept in a cache."""
    remote = _REMOTE.fullmatch(str(path))
    if remote is None:
        return Path(path)
    url, digest = remote["url"], remote["digest"]
    if not digest:
        raise InvalidValueError(
            f"Expected a checkpoint from afar to tell its SHA-256 but got {path}.",
            hint="Append `#sha256=` and the 64 digits of the checksum, or download the file and pass its path.",
            argument="sha256",
            value=path,
        )
    digest = digest.lower()
    return download(url, cache_folder() / "checkpoints" / f"{digest}.ckpt", digest)


def require_checkpoint_file(path: str | Path) -> Path:
    """The file of a checkpoint, which is refused if there is none."""
    file = resolve_checkpoint(path)
    if not file.exists():
        raise MissingFileError(f"Expected a checkpoint at {path} but there is none.", hint=_instead(file), value=path)
    return file


def read_checkpoint(reader: Callable[[BufferedReader], Any], path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint, if it is a whole one of tensors and plain values.

    torch does not look at a file's checksums: a number that has changed on a disk would be loaded in silence.
    """
    file = require_checkpoint_file(path)
    try:
        with open_file(file) as checkpoint_file:
            check_zip(checkpoint_file)
            checkpoint_file.seek(0)
            checkpoint = reader(checkpoint_file)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
            raise ValueError("it has no `state_dict`")
    except Exception as error:  # whatever a damaged file makes of its reader
        raise DamagedFileError(
            f"Expected a whole checkpoint of tensors and plain values at {path} but could not read it ("
            f"{first_line(error)}).",
            hint=error.hint if isinstance(error, LimitError) else _instead(file),
            value=path,
        ) from error
    return checkpoint


def check_zip(file: BufferedReader) -> None:
    """Raise an error if a checksum in a zip file is wrong, or if the file claims to be larger than is plausible."""
    with ZipFile(file) as archive:
        check_members(archive, os.fstat(file.fileno()).st_size)
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} has another checksum")


def newest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint of the latest step in a folder, whatever the time of its file; None: there is none."""
    moments = {}
    for path in folder.glob("*.ckpt"):
        with suppress(Exception):  # whatever a damaged file makes of its reader
            with open_file(path) as file, ZipFile(file) as archive:
                check_zip(file)
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            first = islice(pickletools.genops(content), 12)  # epoch and step stand there; nothing is made of them
            words = [word for code, word, _ in first if word is not None and "PUT" not in code.name]
            state = dict(pairwise(words))
            step = (int(state.get(name, -1)) for name in ("epoch", "global_step"))
            moments[path] = (*step, path.stat().st_mtime)
    return max(moments, key=lambda path: moments[path], default=None)


def get_run_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run.

    Raises:
        MissingFileError: If the run's folder, its recipe or all checkpoints are missing.
        DamagedFileError: If no checkpoint can be read.
    """
    folder = run / "checkpoints"
    if not run.is_dir():
        description = "a file" if run.exists() else "no such folder"
        raise MissingFileError(
            f"Expected the folder of a run at {run} but found {description}.",
            hint="Pass the folder that `lightning-fcl fit` wrote to, as in `runs/fit`.",
            value=run,
        )
    if not (run / "config.yaml").is_file():
        raise MissingFileError(
            f"Expected the recipe of a run at {run / 'config.yaml'} but found no such file.",
            hint="Pass the folder that `lightning-fcl fit` wrote to, or copy its config.yaml there.",
            value=run,
        )
    checkpoint, damaged = newest_checkpoint(folder), sorted(folder.glob("*.ckpt"))
    train = f"Train the recipe in another folder: lightning-fcl fit --config {run / 'config.yaml'} --out FOLDER."
    if checkpoint is None and damaged:
        raise DamagedFileError(
            f"Expected a whole checkpoint in {folder} but all are damaged: "
            f"{format_names(path.name for path in damaged)}.",
            hint=train,
            value=run,
        )
    if checkpoint is None:
        raise MissingFileError(
            f"Expected a checkpoint in {folder} but found none.",
            hint=train,
            value=run,
        )
    return checkpoint


def _instead(file: Path) -> str:
    """Return the hint for a checkpoint that cannot be used."""
    newest = newest_checkpoint(file.parent)
    return "Use another checkpoint." if newest in (None, file) else f"Use {newest}, the newest whole one there."
