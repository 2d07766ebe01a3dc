"""A message as it came becomes numbers in this one place: within limits, and whatever is wrong with it is a refusal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.deployment.parcel import BYTES, Parcel, RefusedError

_DEEPEST = 16  # brackets within brackets of a text
_LONGEST = 500  # characters of a reason
_BESIDE = 256  # bytes of an array's header

_PLAIN = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_ARRAYS = {dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in _PLAIN}
_ARRAYS |= {torch.bfloat16: np.dtype(np.int16)}
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _ARRAYS}

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<|]\w{2,3})', 'fortran_order': False, "
    rb"'shape': \((|\d{1,15},|\d{1,15}(?:, \d{1,15}){1,63})\), \} *\n"
)
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # in JSON, also one that never ends
_BRACKET = re.compile(r"[][{}]")


@dataclass(frozen=True)
class Sealed:
    """A message as it came, of which nothing has been read.

    Args:
        text: Its head, and the types of its arrays.
        arrays: The bytes of each of its arrays.
        failed: Why there is none, where the link knows.
    """

    text: object = ""
    arrays: Mapping[str, bytes] = field(default_factory=dict)
    failed: str = ""


def reason_of(said: object) -> str:
    """What another machine gives as its reason, as a line that can be logged and kept: what is printed, cut short."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(said)[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


@contextmanager
def refusing(sender: str) -> Iterator[None]:
    """Let whatever goes wrong with a message be a refusal of it, with a reason that can be kept.

    Raises:
        RefusedError: In place of any other error.
    """
    try:
        yield
    except RefusedError as error:
        raise RefusedError(reason_of(error)) from error
    except Exception as error:  # whatever a message makes of its reader, also RecursionError and MemoryError
        said = f"Expected a message of {sender} that can be read but got {type(error).__name__}: {reason_of(error)}"
        raise RefusedError(reason_of(said)) from error


def check_bytes(sealed: Sealed, limit: int, sender: str = "a message") -> None:
    """Refuse a message that is larger than agreed, before anything of it is read."""
    size = sum(max(len(data) - _BESIDE, 0) for data in sealed.arrays.values())
    if size > limit:
        raise RefusedError(
            f"Expected at most {limit} bytes of {sender} but got {size}. Raise `message-bytes` of the run's "
            "configuration if the model is that large."
        )


def head_of(sealed: Sealed, longest: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head of a message, and the types of its arrays.

    Args:
        sealed: The message.
        longest: Characters that its text may have.
    """
    text = sealed.text
    if sealed.failed:
        raise RefusedError(sealed.failed)
    if not isinstance(text, str):
        raise RefusedError("Expected a message of lightning-fcl but got another app's.")
    if len(text) > longest:
        raise RefusedError(f"Expected a text of at most {longest} characters but got {len(text)}.")
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(_TEXT.sub("", text)))
    if max(accumulate(steps), default=0) > _DEEPEST:
        raise RefusedError(f"Expected at most {_DEEPEST} brackets within each other but got more: {text[:40]!r}.")
    try:
        said = json.loads(text)
    except ValueError as error:
        raise RefusedError(f"Expected a message of lightning-fcl but got {text[:80]!r}.") from error
    head, types = (said.get(part) if isinstance(said, dict) else None for part in ("head", "types"))
    if not isinstance(head, dict) or not isinstance(types, dict):
        raise RefusedError(f"Expected a message of lightning-fcl but got {text[:80]!r}.")
    if types.keys() != sealed.arrays.keys():
        raise RefusedError(
            f"Expected the arrays {sorted(types)[:5]} of the message but got {sorted(sealed.arrays)[:5]}."
        )
    return head, types


def opened(sealed: Sealed, limit: int = BYTES) -> Parcel:
    """The parcel that a server's message holds.

    Args:
        sealed: The message.
        limit: Bytes that its arrays may have.
    """
    with refusing("the server"):
        check_bytes(sealed, limit)
        head, types = head_of(sealed, limit)
        return Parcel(head, {name: array_of(name, data, types[name]) for name, data in sealed.arrays.items()})


def array_of(name: str, data: bytes, called: object) -> Tensor:
    """The numbers of an array, whose header may promise neither more nor less than there is.

    Args:
        name: Of the entry.
        data: The array as `numpy.save` writes it.
        called: Its type in torch.
    """
    kind = _TYPES.get(called) if isinstance(called, str) else None
    if kind is None:
        raise RefusedError(f"Expected `{name}` to be an array of numbers but got one of {called!r:.80}.")
    length = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
    begins = len(_MAGIC) + 2 + length
    header = _HEADER.fullmatch(data[len(_MAGIC) + 2 : begins]) if data.startswith(_MAGIC) else None
    if header is None:
        raise RefusedError(f"Expected `{name}` to be an array of numbers but got {data[:80]!r}.")
    shape = tuple(int(number) for number in header[2].replace(b",", b" ").split())
    wanted, size = _ARRAYS[kind], len(data) - begins
    if header[1].decode() != wanted.str or math.prod(shape) * wanted.itemsize != size:
        raise RefusedError(
            f"Expected `{name}` to be an array of numbers, {called} as {wanted.str}, but got {size} bytes of "
            f"{header[1].decode()} of shape {shape}."
        )
    array = np.frombuffer(data, wanted, offset=begins).reshape(shape)
    if kind is torch.bool and array.view(np.uint8).max(initial=0) > 1:
        raise RefusedError(f"Expected `{name}` to be an array of numbers, true or false, but got others.")
    value = torch.from_numpy(array.copy())  # what arrives is read-only
    return value.view(torch.bfloat16) if kind is torch.bfloat16 else value
