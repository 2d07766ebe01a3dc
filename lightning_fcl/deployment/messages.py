"""Messages as they are sent, and as numbers again: within limits, and whatever is wrong with one is a refusal."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import State

BYTES = 256 * 2**20
"""Bytes that the arrays of a message may have where nothing else was agreed."""

MODEL, SERVER = "model/", "server/"
"""What names of tensors begin with: of the model, and of what a server keeps for methods."""

CHANGED, VALUES = "|changed", "|values"
"""What names of tensors end with that say what has changed: a bit for each number, and the numbers."""

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
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<|]\w{2,3})', 'fortran_order': False, "
    rb"'shape': \((|\d{1,15},|\d{1,15}(?:, \d{1,15}){1,63})\), \} *\n"
)
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # in JSON, also one that never ends
_BRACKET = re.compile(r"[][{}]")


class RefusedError(ValueError):
    """One side of a deployment does not go on with what the other has sent."""


@dataclass(frozen=True)
class Parcel:
    """A message between server and node: plain values, and tensors by name."""

    head: Mapping[str, Any]
    state: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.state.values())


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
    """Let whatever goes wrong with a message be a refusal of it, with a reason that can be kept."""
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
    """The head of a message whose text has at most so many characters, and the types of its arrays."""
    text = sealed.text
    if sealed.failed:
        raise RefusedError(sealed.failed)
    if not isinstance(text, str) or len(text) > longest:
        said = f"{len(text)}" if isinstance(text, str) else f"another app's {type(text).__name__}"
        raise RefusedError(f"Expected a text of at most {longest} characters but got {said}.")
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(_TEXT.sub("", text)))
    if max(accumulate(steps), default=0) > _DEEPEST:
        raise RefusedError(f"Expected at most {_DEEPEST} brackets within each other but got more: {text[:40]!r}.")
    try:
        said = json.loads(text)
        head, types = said["head"], said["types"]
    except (ValueError, TypeError, KeyError):
        head = types = None
    if not isinstance(head, dict) or not isinstance(types, dict):
        raise RefusedError(f"Expected a message of lightning-fcl but got {text[:80]!r}.")
    if types.keys() != sealed.arrays.keys():
        raise RefusedError(
            f"Expected the arrays {sorted(types)[:5]} of the message but got {sorted(sealed.arrays)[:5]}."
        )
    return head, types


def opened(sealed: Sealed, limit: int = BYTES) -> Parcel:
    """The parcel that a server's message holds, whose arrays have at most so many bytes."""
    with refusing("the server"):
        check_bytes(sealed, limit)
        head, types = head_of(sealed, limit)
        return Parcel(head, {name: array_of(name, data, types[name]) for name, data in sealed.arrays.items()})


def array_of(name: str, data: bytes, called: object) -> Tensor:
    """The numbers of an array that `numpy.save` wrote, whose header may promise neither more nor less than there is.

    Args:
        name: Of the entry.
        data: The array's bytes.
        called: Its type in torch.
    """
    kind = _TYPES.get(called) if isinstance(called, str) else None
    length = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
    begins = len(_MAGIC) + 2 + length
    header = _HEADER.fullmatch(data[len(_MAGIC) + 2 : begins]) if data.startswith(_MAGIC) else None
    if kind is None or header is None:
        raise RefusedError(f"Expected `{name}` to be an array of numbers but got {data[:80]!r} as {called!r:.80}.")
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


def changes(state: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> State:
    """A state in fewer bytes: of an entry of which little has changed since the start, what has changed."""
    found: State = {}
    for name, value in state.items():
        known, value = start[name], value.detach().contiguous()
        if known.shape != value.shape or known.dtype != value.dtype or value.is_complex():
            found[name] = value
            continue
        bits = _BITS[value.element_size()]  # 0 and -0 differ, and a NaN is itself
        changed = (value.view(bits) != known.to(value.device).contiguous().view(bits)).flatten()
        values, mask = value.flatten()[changed], np.packbits(changed.cpu().numpy(), bitorder="little")
        parts = {name + CHANGED: torch.from_numpy(mask), name + VALUES: values}
        found |= parts if values.nbytes + mask.nbytes < value.nbytes else {name: value}
    return found


def restored(sent: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> State:
    """The state of which `changes` has made what was sent, under names and in types that have been checked."""
    found = {name: value for name, value in sent.items() if not name.endswith((CHANGED, VALUES))}
    for name in (name.removesuffix(CHANGED) for name in sent if name.endswith(CHANGED)):
        known, mask, values = start[name].detach().cpu(), sent[name + CHANGED], sent[name + VALUES]
        size = known.numel()
        fits = mask.shape == (-(-size // 8),)
        changed = np.unpackbits(mask.numpy(), count=size, bitorder="little") if fits else np.empty(0, np.uint8)
        if not fits or values.shape != (changed.sum(),):
            raise RefusedError(f"Expected what has changed of `{name}` to fit its {size} numbers.")
        whole = known.flatten().clone()
        whole[torch.from_numpy(changed).bool()] = values
        found[name] = whole.view(known.shape)
    return found


def digest(state: Mapping[str, Tensor]) -> str:
    """A short name of a state: another one has another name."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def check_same(head: Mapping[str, Any], recipe: str, sender: str) -> None:
    """Refuse a message of another version of the library, or of another recipe."""
    for name, does, wanted, mend in (
        ("version", "run lightning-fcl", __version__, "Install one version everywhere: others may compute otherwise."),
        ("recipe", "have the recipe", recipe, "Deploy one recipe everywhere."),
    ):
        if head.get(name) != wanted:
            raise RefusedError(f"Expected {sender} to {does} {wanted} but got {head.get(name)}. {mend}")


def check_names(sent: Iterable[str], wanted: Iterable[str], entries: int, sender: str) -> None:
    """Refuse what is not sent under the names that are wanted of so many entries."""
    strange = sorted({*sent} ^ {*wanted})
    if strange:
        raise RefusedError(
            f"Expected {sender} to send the {entries} entries of this recipe's model but {quoted(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} missing or not among them. Deploy one recipe everywhere."
        )


def check_form(name: str, value: Tensor, wanted: Tensor, sender: str) -> None:
    """Refuse an entry of another type or shape."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise RefusedError(
            f"Expected `{name}` of {sender} to be {wanted.dtype} of shape {tuple(wanted.shape)} but got "
            f"{value.dtype} of shape {tuple(value.shape)}. Deploy one recipe everywhere."
        )
