"""Files of data sets, read with checks: arrays of npz files without pickles, lines of text, numbered files."""

import re
import zipfile
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

AGAIN = "Delete this copy and get the file again."

_CONTENTS = {"f": "floats", "iu": "integers", "biu": "integers", "iuf": "numbers", "U": "text", "pixels": "images"}
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, TypeError, AttributeError, RuntimeError)


def read_npz(
    path: Path, wanted: Mapping[str, tuple[str, tuple[int | str, ...]]], remedy: str = AGAIN
) -> dict[str, NDArray[Any]]:
    """Read arrays of an npz file and check their kinds and shapes.

    Args:
        path: The file.
        wanted: For each name the admitted kinds of dtype, as in `numpy.dtype.kind`, or "pixels" for images of uint8,
            at least one; and the shape: sizes that have a name are free, but equal wherever they have the same name.
        remedy: What to do with a damaged copy.

    Returns:
        The wanted arrays.

    Raises:
        ValueError: If the file is no sound npz file, lacks an array or holds another kind or shape.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(path, x=np.zeros((3, 2)), y=np.zeros(3, int))
        >>> sorted(read_npz(path, {"x": ("f", ("n", 2)), "y": ("iu", ("n",))}))
        ['x', 'y']
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in wanted if name not in archive]
            arrays = {name: archive[name] for name in wanted if name not in missing}
    except _BROKEN as error:
        raise ValueError(
            f"Expected {path} to be a sound npz file without pickles but got: {error}. {remedy}"
        ) from error
    if missing:
        raise ValueError(f"Expected {path} to hold an array {missing[0]!r} but it does not. {remedy}")
    sizes: dict[int | str, int] = {}
    for name, (kinds, shape) in wanted.items():
        found, dtype = arrays[name].shape, arrays[name].dtype
        for size, actual in zip(shape, found, strict=False):
            sizes.setdefault(size, size if isinstance(size, int) else actual)
        problem = ""
        if found != tuple(sizes.get(size, -1) for size in shape) or dtype.kind not in kinds.replace("pixels", "u"):
            expected = tuple(sizes.get(size, size) for size in shape)
            problem = f"{_CONTENTS[kinds]} of shape {expected} but got {dtype} of shape {found}"
        elif kinds == "pixels" and (dtype != np.uint8 or not len(arrays[name])):
            problem = f"uint8 images but got {len(arrays[name])} of {dtype}"
        if problem:
            raise ValueError(f"Expected `{name}` of {path} to hold {problem}. {remedy}")
    return arrays


def in_range(
    values: NDArray[Any], high: int, name: str, remedy: str = AGAIN, low: int = 0, unit: str = "sample", first: int = 0
) -> NDArray[np.int64]:
    """Refuse whole numbers out of a range.

    Args:
        values: The numbers, shape ``(n,)``.
        high: The highest that may be.
        name: What the numbers are, with the file.
        remedy: What to do.
        low: The lowest that may be.
        unit: What each belongs to.
        first: The number of the first of these.

    Returns:
        The numbers, int64.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> in_range(np.array([0, 3]), 2, "`y` of a.npz")
        Traceback (most recent call last):
        ValueError: Expected `y` of a.npz to be between 0 and 2 but got 3 in sample 1. Delete this copy and get the \
file again.
    """
    wrong = np.flatnonzero((values < low) | (values > high))
    if wrong.size:
        raise ValueError(
            f"Expected {name} to be between {low} and {high} but got {values[wrong[0]]} in {unit} {wrong[0] + first}. "
            f"{remedy}"
        )
    return values.astype(np.int64)


def read_lines(path: Path, remedy: str, at_most: int | None = None, errors: str = "strict") -> list[str]:
    r"""The lines of a text file that are not empty.

    Args:
        path: The file.
        remedy: What to do if it is missing or no text.
        at_most: How many lines are read, each up to a million characters; None: all.
        errors: What to do with bytes that are no text, as in `open`.

    Returns:
        The lines, without white space at their ends.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is no text or has no lines.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "wnids.txt"
        >>> _ = path.write_text("n01443537\n\nn01629819\n")
        >>> read_lines(path, "Get it again.")
        ['n01443537', 'n01629819']
    """
    try:
        with path.open(encoding="utf-8", errors=errors) as file:
            lines = islice(iter(lambda: file.readline(1_000_000), ""), at_most)
            found = [line.rstrip() for line in lines if line.strip()]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected {path} to be a text file but got: {error}. {remedy}") from error
    if not found:
        raise ValueError(f"Expected {path} to have lines but it is empty. {remedy}")
    return found


def numbered(folder: Path, pattern: str) -> list[Path]:
    r"""What lies in a folder under names that hold a number, in the order of the numbers.

    Args:
        folder: The folder.
        pattern: Regular expression that a whole name must fit, with the number as its group.

    Returns:
        The paths; none if the folder is not there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = [(folder / name).touch() for name in ("10.pgm", "9.pgm", "._9.pgm")]
        >>> [path.name for path in numbered(folder, r"(\d+)\.pgm")]
        ['9.pgm', '10.pgm']
    """
    found = {path: re.fullmatch(pattern, path.name) for path in folder.glob("*")}
    return [path for _, path in sorted((int(match[1]), path) for path, match in found.items() if match)]
