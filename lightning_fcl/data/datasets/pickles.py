"""Pickles of arrays that may call nothing."""

import math
import mmap
import pickle
import pickletools
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.hub.reading import AGAIN, check_size, reading

_ADMITTED = {
    **{(f"numpy.{core}.multiarray", name): name for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
_NUMBERS = {
    f"{kind}{size}" for kind, sizes in {"b": "1", "i": "1248", "u": "1248", "f": "248"}.items() for size in sizes
}

_OBJECT = 256  # bytes that an opcode makes at most, beside its argument: those of an empty set


def read_pickle(path: Path, remedy: str = AGAIN) -> Any:
    """What a pickle holds, if it is numbers, strings, lists, dicts and NumPy arrays of numbers.

    What the file wants called is only noted down, never called; from the notes, arrays are built afterwards, if they
    hold numbers. Pickles of Python 2 are read with Latin-1, which is how NumPy keeps their bytes.
    """
    with reading(path, "to be a whole pickle of numbers", remedy), path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("an empty file")
        # Of a file that is mapped no more can be asked for than is there.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check(content)
            content.seek(0)
            return _built(_Notes(content, encoding="latin1").load(), {})


def _check(content: mmap.mmap) -> None:
    """Refuse what claims more than is there, before room is made for it."""
    size = len(content)
    for number, (opcode, value, place) in enumerate(pickletools.genops(cast(IO[bytes], content))):
        if not number % 1000:
            check_size(size + _OBJECT * number, size)
        # Memories are numbered one by one, and the unpickler makes room for all up to the highest.
        if opcode.name.endswith("PUT") and (value or 0) > (place or 0):
            raise ValueError(f"a memory of number {value} at byte {place}")


class _Call:
    """A note of a call that a pickle asks for, with the state it sets on the result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Notes(pickle.Unpickler):
    """Resolves no global: what calls those that arrays need is noted down, all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise ValueError(f"`{module}.{name}`, which could run any code")
        return partial(_Call, _ADMITTED[module, name])

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("objects outside of itself")


def _built(value: Any, done: dict[object, Any]) -> Any:
    """What notes stand for; what is noted twice is built once, as a small file could grow without an end."""
    if id(value) not in done:
        done[id(value)] = _build(value, done)
    return done[id(value)]


def _build(value: Any, done: dict[object, Any]) -> Any:
    if isinstance(value, dict):
        return {_built(key, done): _built(entry, done) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(entry, done) for entry in value)
    if not isinstance(value, _Call):
        return value
    if value.name == "_reconstruct":
        _, shape, dtype, fortran, raw = value.state
        return _array(_dtype(dtype), tuple(shape), "F" if fortran else "C", _bytes(raw, done))
    if value.name == "scalar":
        return _array(_dtype(value.args[0]), (), "C", _bytes(value.args[1], done))[()]
    if value.name == "encode" and value.args[1:] in (("latin1",), ("latin-1",)):
        return _bytes(value.args[0], done)
    raise ValueError(f"a bare {value.name}")


def _bytes(raw: Any, done: dict[object, Any]) -> bytes:
    content = _built(raw, done)
    if isinstance(content, bytes):
        return content
    key = id(content), "bytes"  # of a string, as Python 2 has written bytes
    if key not in done:
        done[key] = str.encode(content, "latin1")
    return bytes(done[key])


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, content: bytes) -> NDArray[Any]:
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {dtype} of shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _dtype(call: Any) -> np.dtype[Any]:
    code, order = call.args[0], call.state[1] if call.state else "|"
    if call.name != "dtype" or code not in _NUMBERS or order not in ("<", ">", "|", "="):
        raise ValueError(f"an array of type {str(code)!r}")
    return np.dtype(f"{order}{code}")
