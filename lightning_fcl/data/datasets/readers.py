"""Files of data sets, where they come from, and how they are read: within limits, with checks, and calling nothing."""

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
_HEADER = 1000  # characters of an array's header; those of numbers and text have some 100

MAX_TEXT_LENGTH = 40
"""Bytes of memory for a byte of text, at most: a line of one digit is a string of 64 bytes with 9 to point to it."""


def read_arrays(path: Path, names: Iterable[str], remedy: str = REDOWNLOAD_HINT) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file that are there, of numbers and text, with its checksums compared.

    Nothing is unpacked of a file, or an array, that claims more than is plausible, or than there is.
    """
    with (
        as_file_error(path, "to be a sound npz file without pickles", remedy),
        open_file(path) as packed,
        ZipFile(packed) as archive,
    ):
        check_members(archive, os.fstat(packed.fileno()).st_size)
        members: dict[str, ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            check(name not in members, f"two members of the name {name!r}")
            members[name] = member
        for member in archive.infolist():  # lest one is overlooked: its name is compared with its other place
            check(not member.comment, f"a comment to {member.filename}, which may be other members")
            archive.open(member).close()
        arrays: dict[str, NDArray[Any]] = {}
        for name in (name for name in names if name in members):
            with archive.open(member := members[name]) as file:
                shape, _, dtype = _HEADERS[npy.read_magic(file)](file, max_header_size=_HEADER)
                size = math.prod(shape) * dtype.itemsize
                fits = size + file.tell() == member.file_size and (size or shape[:1] == (0,))  # no bytes fit any number
                description = f"{dtype} of shape {shape} in the {member.file_size} bytes of {member.filename}"
                check(not dtype.hasobject, f"objects in {member.filename}, in place of numbers or text")
                check(fits, description)
                file.seek(0)
                arrays[name] = npy.read_array(file, allow_pickle=False)
                file.read()  # the checksum is compared at the end
        return arrays


def read_npz(path: Path, spec: ArraySpec, remedy: str = REDOWNLOAD_HINT) -> dict[str, NDArray[Any]]:
    """Arrays of an npz file, as `read_arrays` reads them, of the wanted kinds and shapes.

    For each name stand the kinds of dtype, as in `numpy.dtype.kind`, or "pixels" for images of uint8, at least one; and
    the shape: sizes that have a name are free, but equal wherever they have the same name, and `ANY_SIZE` ends it
    anyhow.
    """
    arrays = read_arrays(path, spec, remedy)
    if missing := [name for name in spec if name not in arrays]:
        raise InvalidValueError(f"Expected {path} to hold an array {missing[0]!r} but it does not. {remedy}")
    check_arrays(path, arrays, spec, remedy)
    return arrays


def check_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], spec: ArraySpec, remedy: str = REDOWNLOAD_HINT
) -> None:
    """Refuse arrays of other kinds and shapes than those that are wanted."""
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
            problem = f"{_CONTENTS[kinds]} of shape {expected} but got {dtype} of shape {actual_shape}"
        elif kinds == "pixels" and (dtype != np.uint8 or not len(arrays[name])):
            problem = f"uint8 images but got {len(arrays[name])} of {dtype}"
        if problem:
            raise InvalidValueError(f"Expected `{name}` of {path} to hold {problem}. {remedy}", argument=name)


def check_subset(name: str, values: Sequence[str], allowed: Iterable[str]) -> None:
    """Refuse what is no list of different names among the known ones."""
    if isinstance(values, str) or not values or len(set(values)) < len(values) or not set(values) <= set(allowed):
        raise InvalidValueError(
            f"Expected `{name}` to be different names among {', '.join(allowed)} but got {values!r}.",
            hint="Pass a list of some.",
            argument=name,
            value=values,
        )


def check_int_range(values: NDArray[Any], high: int, name: str, remedy: str = REDOWNLOAD_HINT) -> NDArray[np.int64]:
    """Whole numbers, int64, if they are between 0 and a number."""
    for row in np.flatnonzero((values < 0) | (values > high)):
        raise InvalidValueError(
            f"Expected {name} to be between 0 and {high} but got {values[row]} in sample {row}. {remedy}",
            argument=name,
            value=int(values[row]),
        )
    return values.astype(np.int64)


def read_lines(path: Path, remedy: str) -> list[str]:
    """The lines of a text file that are not empty, without white space at their ends."""
    with as_file_error(path, "to be a text file", remedy):
        check_size(MAX_TEXT_LENGTH * path.stat().st_size)
        lines = [line.rstrip() for line in read_text(path, "utf-8-sig").split("\n") if line.strip()]
    if not lines:
        raise InvalidValueError(f"Expected {path} to have lines but it is empty. {remedy}", value=path)
    return lines


def numbered_paths(folder: Path, pattern: str) -> list[Path]:
    """What lies in a folder under names that fit a pattern, in the order of the number that is the pattern's group."""
    matches = {path: re.fullmatch(pattern, path.name) for path in folder.glob("*")}
    return [path for _, path in sorted((int(match[1]), path) for path, match in matches.items() if match)]


# Pickles of arrays that may call nothing.

_ADMITTED = {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
_ADMITTED |= {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_NUMBERS = {
    f"{kind}{size}" for kind, sizes in {"b": "1", "i": "1248", "u": "1248", "f": "248"}.items() for size in sizes
}
_OBJECT = 256  # bytes that an opcode makes at most, beside its argument: those of an empty set


class _Call:
    """A call that a pickle asks for, which is never made, with the state it sets on the result."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Resolves no global: the calls that arrays need are noted down, all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise ValueError(f"`{module}.{name}`, which could run any code")
        return partial(_Call, name)

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("objects outside of itself")


def read_restricted_pickle(path: Path, remedy: str = REDOWNLOAD_HINT) -> Any:
    """What a pickle holds of numbers, strings, lists, dicts, and of what `array_from_pickle` makes arrays.

    What the file wants called is never called. Strings of Python 2 are read with Latin-1, which is how NumPy keeps
    bytes.
    """
    with as_file_error(path, "to be a whole pickle of numbers", remedy), open_file(path) as file:
        check(size := os.fstat(file.fileno()).st_size, "an empty file")
        # Of a file that is mapped no more can be asked for than is there.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for number, (opcode, value, position) in enumerate(pickletools.genops(cast(IO[bytes], content))):
                if not number % 1000:
                    check_size(size + _OBJECT * number, size)
                # Memories are numbered one by one, and the unpickler makes room for all up to the highest.
                if opcode.name.endswith("PUT") and (value or 0) > (position or 0):
                    raise ValueError(f"a memory of number {value} at byte {position}")
            content.seek(0)
            return _Unpickler(content, encoding="latin1").load()


def array_from_pickle(value: Any) -> NDArray[Any]:
    """An array of numbers that a pickle holds."""
    if not isinstance(value, _Call) or value.name != "_reconstruct" or not value.state:
        raise ValueError(f"no array but {str(value)[:40]!r}")
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
