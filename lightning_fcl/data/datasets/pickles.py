"""Pickles of arrays that may call nothing."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ADMITTED = {
    **{(f"numpy.{core}.multiarray", name): name for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
_NUMBERS = {
    f"{kind}{size}" for kind, sizes in {"b": "1", "i": "1248", "u": "1248", "f": "248"}.items() for size in sizes
}

# A damaged pickle can end in nearly any built-in error; the machine's own (memory, interrupt) are not among them.
_BROKEN = (
    *(ArithmeticError, AttributeError, EOFError, ImportError, LookupError, OSError, RecursionError),
    *(pickle.UnpicklingError, TypeError, ValueError),
)


def read_pickle(path: Path, remedy: str = "Get it again.") -> Any:
    """Read a pickle of numbers, strings, lists, dicts and NumPy arrays of numbers; refuse every other.

    What the file wants called is only noted down, never called; from the notes, arrays are built afterwards, if they
    hold numbers. Pickles of Python 2 are read with Latin-1, which is how NumPy keeps their bytes.

    Args:
        path: The file.
        remedy: What to do if it is missing or damaged.

    Returns:
        What was pickled.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If the file wants anything but arrays of numbers, is cut short or is no pickle; the message names
            the refused global and the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.pkl"
        >>> _ = path.write_bytes(pickle.dumps({"label": np.array([1, 2])}, protocol=2))
        >>> read_pickle(path)
        {'label': array([1, 2])}
        >>> _ = path.write_bytes(pickle.dumps(print))
        >>> read_pickle(path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Expected ...a.pkl to hold arrays of numbers only but it asks for `builtins.print`, ...
    """
    try:
        with path.open("rb") as file:
            return _built(_Notes(file, encoding="latin1").load())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {remedy}") from error
    except _RefusedError as refused:
        raise ValueError(f"Expected {path} to hold arrays of numbers only but it {refused}") from None
    except _BROKEN as error:
        raise ValueError(
            f"Expected {path} to be a whole pickle but got {type(error).__name__}: {error}. {remedy}"
        ) from error


class _RefusedError(Exception):
    """What a pickle asks for and does not get."""


class _Call:
    """A note of a call that a pickle asks for, with the state it sets on the result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Global:
    """A name that a pickle may mention; calling it only notes the call down."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> _Call:
        return _Call(self.name, args)


class _Notes(pickle.Unpickler):
    """Resolves no global: the ones that arrays need become `_Global`, all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _RefusedError(
                f"asks for `{module}.{name}`, which could run any code. Use the publishers' own file, and delete this "
                "one if you do not know who made it."
            )
        return _Global(_ADMITTED[module, name])

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("refers to objects outside of itself. Use the publishers' own file.")


def _built(value: Any) -> Any:
    if isinstance(value, dict):
        return {_built(key): _built(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(entry) for entry in value)
    if not isinstance(value, _Call):
        return value
    if value.name == "_reconstruct":
        _, shape, dtype, fortran, raw = value.state
        return _array(raw, _dtype(dtype), tuple(shape), "F" if fortran else "C")
    if value.name == "scalar":
        return _array(value.args[1], _dtype(value.args[0]), (), "C")[()]
    if value.name == "encode":
        return _bytes(value)
    raise ValueError(f"a bare {value.name}")


def _array(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    content = _bytes(raw)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {dtype} of shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _dtype(call: Any) -> np.dtype[Any]:
    code, order = call.args[0], call.state[1] if call.state else "|"
    if call.name != "dtype" or code not in _NUMBERS or order not in ("<", ">", "|", "="):
        raise _RefusedError(f"holds an array of type {str(code)!r}. Use the publishers' own file.")
    return np.dtype(f"{order}{code}")


def _bytes(raw: Any) -> bytes:
    if isinstance(raw, _Call) and raw.name == "encode" and raw.args[1:] in (("latin1",), ("latin-1",)):
        raw = raw.args[0]
    return raw if isinstance(raw, bytes) else str.encode(raw, "latin1")
