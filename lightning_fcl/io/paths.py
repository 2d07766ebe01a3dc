"""Paths that cannot lead out of a given folder, and the cache folder."""

import os
import re
from pathlib import Path
from unicodedata import is_normalized

from lightning_fcl.errors import InvalidValueError

# Maximum length of a name in bytes. File systems allow 255 bytes, and the temporary name of a file adds some bytes.
_LONGEST = 240
_PLAIN = re.compile(r'[^/\\:*?"<>|]*[^/\\:*?"<>| .]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)( *\..*)?", re.IGNORECASE)


def cache_folder() -> Path:
    """Return the cache folder of this library: ``LIGHTNING_FCL_CACHE``, or a folder in the user's cache."""
    return Path(os.environ.get("LIGHTNING_FCL_CACHE") or Path("~/.cache/lightning-fcl")).expanduser().absolute()


def safe_join(folder: Path, *names: object) -> Path:
    """Return the path of a name inside a folder. The name can come from an untrusted file or message.

    Each part of a name must refer to the same file on every operating system. A part is rejected in these cases:

    - It is empty, ``..``, or a reserved name such as ``con``.
    - It contains a backslash, one of ``: * ? " < > |``, or a character that is not printable.
    - It ends in a space or a dot.
    - It is not in Unicode form NFKC.
    - It is longer than 240 bytes.

    Args:
        folder: The folder. The folder itself can be a link, but a link inside the folder must not lead out of it.
        *names: Names to join. A name can contain several parts with ``/`` between them.

    Raises:
        InvalidValueError: If a name is invalid, or if the path is not inside the folder.
    """
    parts = [part for name in names for part in (name.split("/") if isinstance(name, str) else [name])]
    plain = [part for part in parts if isinstance(part, str) and _is_plain(part)]
    path = folder.joinpath(*plain)
    root, real = os.path.realpath(folder), os.path.realpath(path)
    if plain != parts or real == root or not Path(real).is_relative_to(root):
        raise InvalidValueError(
            f"Expected the name of a file or folder inside {folder}, but got {'/'.join(map(str, names))[:300]!r}, "
            "which is invalid on some operating systems or leads out of the folder.",
            hint="Use a name of letters, digits, `_` and `-` that is not a link to another folder.",
            argument="name",
            value="/".join(map(str, names)),
        )
    return path


def _is_plain(name: str) -> bool:
    """Return whether a name is a single part that refers to the same file on every operating system."""
    plain = _PLAIN.fullmatch(name) and not _RESERVED.fullmatch(name) and is_normalized("NFKC", name)
    return bool(plain) and name.isprintable() and len(name.encode()) <= _LONGEST
