"""Paths that stay inside their directory, and the cache directory."""

import os
import re
from pathlib import Path
from unicodedata import is_normalized

from lightning_fcl.errors import InvalidValueError

_LONGEST = 240  # bytes of a name: that of a temporary file beside it is a little longer
_PLAIN = re.compile(r'[^/\\:*?"<>|]*[^/\\:*?"<>| .]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)( *\..*)?", re.IGNORECASE)


def cache_folder() -> Path:
    """The folder of what was downloaded: ``LIGHTNING_FCL_CACHE``, else one in the user's cache."""
    return Path(os.environ.get("LIGHTNING_FCL_CACHE") or Path("~/.cache/lightning-fcl")).expanduser().absolute()


def safe_join(folder: Path, *names: object) -> Path:
    """The path of what a file or a message names, if it lies in its folder.

    A name, or each of several with ``/`` between them, is one that every system takes for itself alone: no ``..``, no
    drive, nothing that is not printed, no space or dot at its end, in Unicode's form NFKC, of at most 240 bytes.

    Args:
        folder: The folder. It may be a link itself, but no link in it may lead out of it.
    """
    parts = [part for name in names for part in (name.split("/") if isinstance(name, str) else [name])]
    plain = [part for part in parts if isinstance(part, str) and _is_plain(part)]
    path = folder.joinpath(*plain)
    root, real = os.path.realpath(folder), os.path.realpath(path)
    if plain != parts or real == root or not Path(real).is_relative_to(root):
        raise InvalidValueError(
            f"Expected a plain name of something inside {folder} but got {'/'.join(map(str, names))[:300]!r}, which "
            "may be taken for another or leads elsewhere.",
            hint="Use a name of letters, digits, `_` and `-` that is no link to another folder.",
            argument="name",
            value="/".join(map(str, names)),
        )
    return path


def _is_plain(name: str) -> bool:
    """Whether it is one name, and the same to every system."""
    plain = _PLAIN.fullmatch(name) and not _RESERVED.fullmatch(name) and is_normalized("NFKC", name)
    return bool(plain) and name.isprintable() and len(name.encode()) <= _LONGEST
