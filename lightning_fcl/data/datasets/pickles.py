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

from lightning_fcl.hub.reading import AGAIN, check_size, ensure, reading

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


def read_pickle(path: Path, remedy: str = AGAIN) -> Any:
    """What a pickle holds of numbers, strings, lists, dicts, and of what `pickled_array` makes arrays.

    What the file wants called is never called. Strings of Python 2 are read with Latin-1, which is how NumPy keeps
    bytes.
    """
    with reading(path, "to be a whole pickle of numbers", remedy), path.open("rb") as file:
        ensure(size := path.stat().st_size, "an empty file")
        # Of a file that is mapped no more can be asked for than is there.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for number, (opcode, value, place) in enumerate(pickletools.genops(cast(IO[bytes], content))):
                if not number % 1000:
                    check_size(size + _OBJECT * number, size)
                # Memories are numbered one by one, and the unpickler makes room for all up to the highest.
                if opcode.name.endswith("PUT") and (value or 0) > (place or 0):
                    raise ValueError(f"a memory of number {value} at byte {place}")
            content.seek(0)
            return _Unpickler(content, encoding="latin1").load()


def pickled_array(value: Any) -> NDArray[Any]:
    """An array of numbers that a pickle holds."""
    if not isinstance(value, _Call) or value.name != "_reconstruct" or not value.state:
        raise ValueError(f"no array but {str(value)[:40]!r}")
    _, shape, dtype, fortran, content = value.state
    if isinstance(content, _Call) and content.name == "encode" and content.args[1] in ("latin1", "latin-1"):
        content = content.args[0]
    content = content.encode("latin1") if isinstance(content, str) else content
    code, order = dtype.args[0], dtype.state[1] if dtype.state else "|"
    fits = dtype.name == "dtype" and code in _NUMBERS and order in ("<", ">", "|", "=")
    ensure(fits, f"an array of type {str(code)!r}")
    kind = np.dtype(f"{order}{code}")
    ensure(len(content) == math.prod(shape) * kind.itemsize, f"{len(content)} bytes for {kind} of shape {shape}")
    return np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")
