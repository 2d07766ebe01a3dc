"""Functions that find, download and read checkpoints, and verify their checksums."""

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
from lightning_fcl.io.reading import LimitError, LimitSettingError, check_members, open_file
from lightning_fcl.library_errors import first_line
from lightning_fcl.validation import format_names

_REMOTE = re.compile(r"(?P<url>\w+://[^#]*)(#(?:sha256=(?P<digest>[0-9a-f]{64})|.*))?", re.IGNORECASE)


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the local path of a checkpoint.

    A URL such as ``https://host/name.ckpt#sha256=...`` is downloaded to the cache and verified. A path is not checked.

    Raises:
        InvalidValueError: If a URL does not end in a SHA-256 checksum.
    """
    remote = _REMOTE.fullmatch(str(path))
    if remote is None:
        return Path(path)
    url, digest = remote["url"], remote["digest"]
    if not digest:
        raise InvalidValueError(
            f"Expected the URL of a checkpoint to end in its SHA-256 checksum, but got {path}.",
            hint="Append `#sha256=` and the 64 digits of the checksum, or download the file and pass its path.",
            argument="sha256",
            value=path,
        )
    digest = digest.lower()
    return download(url, cache_folder() / "checkpoints" / f"{digest}.ckpt", digest)


def check_weights_only(weights_only: bool | None) -> None:
    """Raise InvalidValueError if a checkpoint should be read with ``weights_only=False``, which can run code."""
    if weights_only is False:
        raise InvalidValueError(
            "Expected `weights_only` to be True, but got False. False is not needed, because the checkpoints of "
            "lightning-fcl contain only tensors and plain values. With False, reading a file can run code that the "
            "file contains.",
            hint="Remove `weights_only`.",
            argument="weights_only",
            value=weights_only,
        )


def require_checkpoint_file(path: str | Path) -> Path:
    """Return the local path of a checkpoint, or raise MissingFileError if there is no such file."""
    file = resolve_checkpoint(path)
    if not file.exists():
        raise MissingFileError(f"Expected a checkpoint at {path} but there is none.", hint=_instead(file), value=path)
    return file


def read_checkpoint(reader: Callable[[BufferedReader], Any], path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint after checking the file.

    The checksums in the file are verified because torch does not verify them. Without this check, a number that has
    changed on the disk would be loaded without an error.

    Args:
        reader: Function that reads the open file, such as `torch.load`.
        path: Path or URL of the checkpoint.

    Raises:
        MissingFileError: If there is no such file.
        LimitSettingError: If the environment variable with the size limit is invalid.
        DamagedFileError: If the file is damaged, too large, or has no ``state_dict``.
    """
    file = require_checkpoint_file(path)
    try:
        with open_file(file) as checkpoint_file:
            check_zip(checkpoint_file)
            checkpoint_file.seek(0)
            checkpoint = reader(checkpoint_file)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
            raise ValueError("it has no `state_dict`")
    except LimitSettingError:
        raise
    except Exception as error:  # a damaged file can cause any error in the reader
        raise DamagedFileError(
            f"Expected an undamaged checkpoint of tensors and plain values at {path}, but could not read it "
            f"({first_line(error)}).",
            hint=error.hint if isinstance(error, LimitError) else _instead(file),
            value=path,
        ) from error
    return checkpoint


def check_zip(file: BufferedReader) -> None:
    """Raise an error if a checksum in a zip file is wrong, or if the unpacked content exceeds the size limit."""
    with ZipFile(file) as archive:
        check_members(archive, os.fstat(file.fileno()).st_size)
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} has a wrong checksum")


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the undamaged checkpoint with the highest epoch and step in a folder, or None if there is none.

    If two checkpoints have the same epoch and step, return the checkpoint that was modified last.
    """
    moments = {}
    for path in folder.glob("*.ckpt"):
        with suppress(Exception):  # a damaged file can cause any error in its reader
            with open_file(path) as file, ZipFile(file) as archive:
                check_zip(file)
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            # The first operations of the pickle contain epoch and step. They are parsed without being executed.
            first = islice(pickletools.genops(content), 12)
            words = [word for code, word, _ in first if word is not None and "PUT" not in code.name]
            state = dict(pairwise(words))
            step = (int(state.get(name, -1)) for name in ("epoch", "global_step"))
            moments[path] = (*step, path.stat().st_mtime)
    return max(moments, key=lambda path: moments[path], default=None)


def get_run_checkpoint(run: Path) -> Path:
    """Return the newest undamaged checkpoint of a run.

    Raises:
        MissingFileError: If the run's folder, its recipe or every checkpoint is missing.
        DamagedFileError: If there are checkpoints, but all of them are damaged.
    """
    folder = run / "checkpoints"
    if not run.is_dir():
        description = "a file" if run.exists() else "no such folder"
        raise MissingFileError(
            f"Expected the folder of a run at {run} but found {description}.",
            hint="Pass the folder that `lightning-fcl fit` wrote to, such as `runs/fit`.",
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
            f"Expected an undamaged checkpoint in {folder}, but each checkpoint is damaged: "
            f"{format_names(path.name for path in damaged)}.",
            hint=train,
            value=run,
        )
    if checkpoint is None:
        raise MissingFileError(
            f"Expected a checkpoint in {folder}, but found none.",
            hint=train,
            value=run,
        )
    return checkpoint


def _instead(file: Path) -> str:
    """Return a hint to use the newest undamaged checkpoint in a file's folder, or any other checkpoint."""
    newest = newest_checkpoint(file.parent)
    return (
        "Use another checkpoint." if newest in (None, file) else f"Use {newest}, the newest undamaged checkpoint there."
    )
