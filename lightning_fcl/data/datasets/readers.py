"""Sources of the datasets, and functions that read dataset files, limit their sizes, and run no code in the files."""

import math
import mmap
import os
import pickle
import pickletools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.download import Source
from lightning_fcl.io.reading import (
    REDOWNLOAD_HINT,
    as_file_error,
    check,
    check_members,
    check_size,
    open_file,
    read_text,
)

SOURCES = Source.read(Path(__file__).with_name("sources.yaml"))

ANY_SIZE = "..."
ArraySpec = Mapping[str, tuple[str, tuple[int | str, ...]]]

_CONTENTS = {"f": "floats", "iu": "integers", "biu": "integers", "iuf": "numbers", "U": "text", "pixels": "images"}
_CONTENTS |= {"iuU": "integers or text", "biufU": "numbers or text"}
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# Maximum length of an array's header, in characters. Headers of arrays of numbers or text have about 100 characters.
_HEADER = 1000

MAX_TEXT_LENGTH = 40
"""Upper limit for the memory that text needs after parsing, in bytes per byte of text.

A line of one digit is two bytes of text. In memory, this line needs a string of 64 bytes, and 9 bytes for references.
"""


def read_arrays(path: Path, names: Iterable[str], remedy: str = REDOWNLOAD_HINT) -> dict[str, NDArray[Any]]:
    """Return the arrays with the given names from an npz file. Names that the file does not contain are left out.

    Only arrays of numbers and text are read, and their checksums are verified. The sizes of the file and of each array
    are checked before memory is allocated.

    Raises:
        MissingFileError: If there is no file.
        DamagedFileError: If the file is damaged, too large, or contains pickled objects.
    """
    with (
        as_file_error(path, "to be a valid npz file without pickles", remedy),
        open_file(path) as packed,
        ZipFile(packed) as archive,
    ):
        check_members(archive, os.fstat(packed.fileno()).st_size)
        members: dict[str, ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            check(name not in members, f"two members with the name {name!r}")
            members[name] = member
        # `open` checks that the archive has the same name for a member in both headers. A comment could hide members.
        for member in archive.infolist():
            check(not member.comment, f"a comment on {member.filename}, which may contain other members")
            archive.open(member).close()
        arrays: dict[str, NDArray[Any]] = {}
        for name in (name for name in names if name in members):
            with archive.open(member := members[name]) as file:
                shape, _, dtype = _HEADERS[npy.read_magic(file)](file, max_header_size=_HEADER)
                size = math.prod(shape) * dtype.itemsize
                # Without the second condition, an array of 0 bytes could declare any number of elements.
                fits = size + file.tell() == member.file_size and (size or shape[:1] == (0,))
                description = f"{dtype} of shape {shape} in the {member.file_size} bytes of {member.filename}"
                check(not dtype.hasobject, f"objects in {member.filename} instead of numbers or text")
                check(fits, description)
                file.seek(0)
                arrays[name] = npy.read_array(file, allow_pickle=False)
                # `zipfile` verifies the checksum at the end of the member.
                file.read()
        return arrays


def read_npz(path: Path, spec: ArraySpec, remedy: str = REDOWNLOAD_HINT) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file, and check their kinds and shapes. See `read_arrays` for the reading.

    Args:
        path: The npz file.
        spec: The kinds and the shape of each array, by name. Kinds are letters of `numpy.dtype.kind`, or "pixels" for
            at least one uint8 image. A size in a shape is a number or a name. Sizes with the same name must be equal.
            `ANY_SIZE` at the end of a shape allows any number of further axes.
        remedy: Hint for errors.

    Raises:
        MissingFileError: If there is no file.
        InvalidValueError: If an array is missing, or has a wrong kind or shape.
    """
    arrays = read_arrays(path, spec, remedy)
    if missing := [name for name in spec if name not in arrays]:
        raise InvalidValueError(f"Expected {path} to contain an array {missing[0]!r}, but it does not. {remedy}")
    check_arrays(path, arrays, spec, remedy)
    return arrays


def check_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], spec: ArraySpec, remedy: str = REDOWNLOAD_HINT
) -> None:
    """Raise InvalidValueError if an array has a different kind or shape than specified. See `read_npz` for ``spec``."""
    sizes: dict[int | str, int] = {}
    for name, (kinds, shape) in spec.items():
        actual_shape, dtype = arrays[name].shape, arrays[name].dtype
        shape = (*shape[:-1], *actual_shape[len(shape) - 1 :]) if shape[-1:] == (ANY_SIZE,) else shape
        for size, actual in zip(shape, actual_shape, strict=False):
            sizes.setdefault(size, size if isinstance(size, int) else actual)
        problem = ""
        is_long = dtype.kind == "f" and dtype.itemsize > 8
        is_kind = dtype.kind in kinds.replace("pixels", "u") and not is_long
        if actual_shape != tuple(sizes.get(size, -1) for size in shape) or not is_kind:
            expected = tuple(sizes.get(size, size) for size in shape)
            problem = f"{_CONTENTS[kinds]} of shape {expected}, but got {dtype} of shape {actual_shape}"
        elif kinds == "pixels" and (dtype != np.uint8 or not len(arrays[name])):
            problem = f"at least one uint8 image, but got {dtype} of shape {actual_shape}"
        if problem:
            raise InvalidValueError(f"Expected `{name}` of {path} to contain {problem}. {remedy}", argument=name)


def check_subset(name: str, values: Sequence[str], allowed: Iterable[str]) -> None:
    """Raise InvalidValueError unless ``values`` is a non-empty list of different names from ``allowed``."""
    if isinstance(values, str) or not values or len(set(values)) < len(values) or not set(values) <= set(allowed):
        raise InvalidValueError(
            f"Expected `{name}` to be a list of different names from {', '.join(allowed)}, but got {values!r}.",
            hint="Pass a list of at least one of these names, each at most once.",
            argument=name,
            value=values,
        )


def check_int_range(values: NDArray[Any], high: int, name: str, remedy: str = REDOWNLOAD_HINT) -> NDArray[np.int64]:
    """Return integers as int64. Raise InvalidValueError if a value is below 0 or above ``high``."""
    for row in np.flatnonzero((values < 0) | (values > high)):
        raise InvalidValueError(
            f"Expected {name} to be between 0 and {high}, but got {values[row]} in sample {row}. {remedy}",
            argument=name,
            value=int(values[row]),
        )
    return values.astype(np.int64)


def read_lines(path: Path, remedy: str) -> list[str]:
    """Return the non-empty lines of a text file, without trailing whitespace."""
    with as_file_error(path, "to be a text file", remedy):
        check_size(MAX_TEXT_LENGTH * path.stat().st_size)
        lines = [line.rstrip() for line in read_text(path, "utf-8-sig").split("\n") if line.strip()]
    if not lines:
        raise InvalidValueError(
            f"Expected {path} to have at least one non-empty line, but got none. {remedy}", value=path
        )
    return lines


def numbered_paths(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match a pattern, sorted by the number in the pattern's first group."""
    matches = {path: re.fullmatch(pattern, path.name) for path in folder.glob("*")}
    return [path for _, path in sorted((int(match[1]), path) for path, match in matches.items() if match)]


# Reading of arrays from pickles, without calling any function that a pickle names.

_ADMITTED = {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
_ADMITTED |= {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_NUMBERS = {
    f"{kind}{size}" for kind, sizes in {"b": "1", "i": "1248", "u": "1248", "f": "248"}.items() for size in sizes
}
# Upper limit for the bytes that an opcode allocates in addition to its argument. An empty set needs the most bytes.
_OBJECT = 256


class _Call:
    """Record of a call that a pickle requests, and of the state for its result. The call is never executed."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that imports nothing, records the calls that arrays need, and rejects all other calls."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise ValueError(f"`{module}.{name}`, which can run arbitrary code")
        return partial(_Call, name)

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("a reference to an object outside the pickle")


def read_restricted_pickle(path: Path, remedy: str = REDOWNLOAD_HINT) -> Any:
    """Return the content of a pickle. Arrays are returned as records, which `array_from_pickle` converts to arrays.

    The content can have numbers, strings, lists and dicts. No function that the file names is called. Strings of Python
    2 are decoded as Latin-1, because NumPy stored bytes in such strings.

    Raises:
        MissingFileError: If there is no file.
        DamagedFileError: If the file is damaged or too large, or requests calls that NumPy arrays do not need.
    """
    with as_file_error(path, "to be a complete pickle of numbers", remedy), open_file(path) as file:
        check(size := os.fstat(file.fileno()).st_size, "an empty file")
        # Reads from a memory map cannot exceed the size of the file.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for number, (opcode, value, position) in enumerate(pickletools.genops(cast(IO[bytes], content))):
                if not number % 1000:
                    check_size(size + _OBJECT * number, size)
                # The unpickler allocates memo entries up to the highest index, so large indices are rejected.
                if opcode.name.endswith("PUT") and (value or 0) > (position or 0):
                    raise ValueError(f"memo index {value} at byte {position}")
            content.seek(0)
            return _Unpickler(content, encoding="latin1").load()


def array_from_pickle(value: Any) -> NDArray[Any]:
    """Convert the record of an array in a pickle to a NumPy array. See `read_restricted_pickle`."""
    if not isinstance(value, _Call) or value.name != "_reconstruct" or not value.state:
        raise ValueError(f"{str(value)[:40]!r} instead of an array")
    _, shape, dtype, fortran, content = value.state
    if isinstance(content, _Call) and content.name == "encode" and content.args[1] in ("latin1", "latin-1"):
        content = content.args[0]
    content = content.encode("latin1") if isinstance(content, str) else content
    code, order = dtype.args[0], dtype.state[1] if dtype.state else "|"
    fits = dtype.name == "dtype" and code in _NUMBERS and order in ("<", ">", "|", "=")
    check(fits, f"an array of type {str(code)!r}")
    kind = np.dtype(f"{order}{code}")
    check(len(content) == math.prod(shape) * kind.itemsize, f"{len(content)} bytes for {kind} of shape {shape}")
    return np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")
