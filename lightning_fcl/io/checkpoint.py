"""Checkpoints come in: from a file or from afar, verified, as tensors and plain values."""

import pickletools
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.io.download import download
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import LimitError, check_members
from lightning_fcl.library_errors import first_line

_REMOTE = re.compile(r"(?P<url>\w+://[^#]*)(#sha256=(?P<digest>[0-9a-f]{64}))?", re.IGNORECASE)


def local_checkpoint(path: str | Path) -> Path:
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


def checkpoint_file(path: str | Path) -> Path:
    """The file of a checkpoint, which is refused if there is none."""
    file = local_checkpoint(path)
    if not file.exists():
        raise MissingFileError(f"Expected a checkpoint at {path} but there is none.", hint=_instead(file), value=path)
    return file


def read_checkpoint(read: Callable[[Path], Any], path: str | Path) -> dict[str, Any]:
    """A checkpoint, if it is a whole one of tensors and plain values.

    torch does not look at a file's checksums: a number that has changed on a disk would be loaded in silence.
    """
    file = checkpoint_file(path)
    try:
        check_archive(file)
        checkpoint = read(file)
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


def check_archive(file: Path) -> None:
    """Compare the checksums of everything in a zip file, unless it claims to be larger than is plausible."""
    with ZipFile(file) as archive:
        check_members(archive, file.stat().st_size)
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} has another checksum")


def newest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint of the latest step in a folder, whatever the time of its file; None: there is none."""
    moments = {}
    for path in folder.glob("*.ckpt"):
        with suppress(Exception):  # whatever a damaged file makes of its reader
            check_archive(path)
            with ZipFile(path) as archive:
                content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
            first = islice(pickletools.genops(content), 12)  # epoch and step stand there; nothing is made of them
            words = [word for code, word, _ in first if word is not None and "PUT" not in code.name]
            state = dict(pairwise(words))
            step = (int(state.get(name, -1)) for name in ("epoch", "global_step"))
            moments[path] = (*step, path.stat().st_mtime)
    return max(moments, key=lambda path: moments[path], default=None)


def checkpoint_of_run(run: Path) -> Path:
    """The newest checkpoint of a run, whose folder has its recipe, too."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    if checkpoint is None or not (run / "config.yaml").is_file():
        raise InvalidValueError(
            f"Expected the folder of a run, with config.yaml and checkpoints, but got {run}, which is none, or none "
            "of its checkpoints is whole.",
            hint="Pass the folder that `lightning-fcl fit` has written.",
        )
    return checkpoint


def _instead(file: Path) -> str:
    """Return the hint for a checkpoint that cannot be used."""
    newest = newest_checkpoint(file.parent)
    return "Use another checkpoint." if newest in (None, file) else f"Use {newest}, the newest whole one there."
