"""Messages between the server and the nodes: conversion to and from Flower's records, validation and transmission."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.errors import InvalidValueError, LightningFCLError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.validation import format_code_names, require_package

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict
    from flwr.serverapp import Grid

REQUIRED_FOR = "runs federations on real machines", "flower"
"""Purpose of Flower, and the extra of lightning-fcl that installs it, for messages about a missing package."""

MAX_BYTES = 256 * 2**20
"""Default maximum size of the tensors in a message, in bytes."""

OTHER_ROUND, LOST_STATE, UNUSABLE_DATA = "other-round", "lost-state", "unusable-data"
"""Error codes of a node: the client state is from a later round, tensors are lost, or the data is unusable."""

CODE, ARGUMENT = re.compile(r"[a-z][a-z-]{0,39}"), re.compile(r"[A-Za-z_][\w.\[\]-]{0,79}", re.ASCII)
"""Regular expressions for the error code and for the argument name that a node sends."""

MODEL, SERVER = "model/", "server/"
"""Prefixes of tensor names: tensors of the model, and tensors that the server keeps for methods."""

# Maximum number of characters in the header of a client's message, including the names of the values.
_LETTERS = 20_000
# Maximum number of characters of the reason for a rejection.
_LONGEST = 500
# Seconds that the server waits for one answer before it looks for the answer to the next message.
_PATIENCE = 1.0
# Encoding of the arrays of a message.
_FORM = "bytes"
# Name of the header value that contains all nested header values of the server as JSON.
_NESTED = "nested"

_PLAIN = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_TYPES = {str(dtype): dtype for dtype in _PLAIN}


class RejectedMessageError(InvalidValueError):
    """Error for a message from the server or from a node that is invalid or cannot be processed."""

    code = "refused"


@dataclass(frozen=True)
class Parcel:
    """A message between the server and a node: plain values in a header, and tensors by name."""

    header: Mapping[str, Any]
    state: State = field(default_factory=dict)


def to_record(parcel: Parcel) -> RecordDict:
    """Convert a parcel to a Flower record. Header values that are neither text nor numbers become JSON."""
    app = require_package("flwr.app", *REQUIRED_FOR)
    nested = {name: value for name, value in parcel.header.items() if not isinstance(value, str | int | float)}
    head = {name: value for name, value in parcel.header.items() if name not in nested}
    arrays = {
        name: app.Array(str(value.dtype), tuple(value.shape), _FORM, bytes_of(value))
        for name, value in parcel.state.items()
    }
    head |= {_NESTED: json.dumps(nested, default=int)} if nested else {}
    record: RecordDict = app.RecordDict({"head": app.ConfigRecord(head), "arrays": app.ArrayRecord(arrays)})
    return record


def to_arrays(record: RecordDict) -> Mapping[str, Array]:
    """Return the undecoded tensors of a message by name: the bytes, and the type and shape that the sender claims."""
    return record.array_records.get("arrays") or {}


def refusal_of(error: Exception) -> dict[str, str]:
    """Return the part of an error that a node sends: the error's code and the name of the invalid argument.

    The text of an error can contain values of the node's data. Therefore the text stays in the log of the node.
    """
    if not isinstance(error, LightningFCLError):
        return {"refused": "internal-error", "argument": ""}
    argument = error.argument or ""
    return {"refused": error.code, "argument": argument if ARGUMENT.fullmatch(argument) else ""}


def sanitize_reason(reason: object) -> str:
    """Return a reason from another machine as one line of printable text with at most 500 characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(reason)[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


@contextmanager
def as_rejection(sender: str) -> Iterator[None]:
    """Temporarily convert each error to a RejectedMessageError with a printable reason of limited length."""
    try:
        yield
    except RejectedMessageError as error:
        refusal = RejectedMessageError(sanitize_reason(error), argument=error.argument, code=error.code)
        refusal.hint = error.hint
        raise refusal from error
    except Exception as error:  # Invalid messages can raise any error, such as RecursionError and MemoryError.
        message = f"Expected a readable message from {sender}, but got {type(error).__name__}: {sanitize_reason(error)}"
        raise RejectedMessageError(sanitize_reason(message)) from error


def check_records(record: RecordDict, limit: int, sender: str = "the server") -> None:
    """Raise RejectedMessageError if records are missing, unexpected or wrongly encoded, or exceed ``limit`` bytes."""
    if len(record) != 2 or "head" not in record.config_records or "arrays" not in record.array_records:
        raise RejectedMessageError(
            f"Expected only a config record `head` and an array record `arrays` from {sender}, but got "
            f"{format_code_names(record) or 'no records'}. Start the app that `lightning-fcl deploy flower` wrote."
        )
    if wrong_names := [name for name, array in to_arrays(record).items() if array.stype != _FORM]:
        raise RejectedMessageError(
            f"Expected the arrays from {sender} to be encoded as `{_FORM}`, but got another encoding of "
            f"{format_code_names(wrong_names)}."
        )
    size = sum(len(array.data) for array in to_arrays(record).values())
    if size > limit:
        raise RejectedMessageError(
            f"Expected at most {limit} bytes of arrays from {sender}, but got {size}.",
            # With a limit of 0, the message should have no arrays, so a higher limit is not the fix.
            hint=f"If the model is that large, set `max-message-bytes` to at least {size} in the run configuration."
            if limit
            else "",
        )


def read_header(record: RecordDict, letters: int = _LETTERS) -> dict[str, Any]:
    """Return the header of a message: plain values, with at most ``letters`` characters in total.

    Raises:
        RejectedMessageError: If the header contains nested values or too many characters.
    """
    head = record.config_records["head"]
    wrong_names = [name for name, value in head.items() if not isinstance(value, str | int | float)]
    if wrong_names:
        raise RejectedMessageError(
            f"Expected the header to contain only text, numbers and booleans, but `{wrong_names[0]}` has another type."
        )
    size = sum(len(name) + len(value if isinstance(value, str) else " ") for name, value in head.items())
    if size > letters:
        raise RejectedMessageError(
            f"Expected the header of a message to have at most {letters} characters, but got {size}."
        )
    return dict(head)


def unpack(record: RecordDict, limit: int = MAX_BYTES) -> Parcel:
    """Convert a record from the server to a parcel.

    ``limit`` is the maximum number of bytes of the tensors, and of characters of the header.
    """
    with as_rejection("the server"):
        check_records(record, limit)
        head = read_header(record, limit)
        head |= json.loads(head.pop(_NESTED, "{}"))
        return Parcel(head, tensors_of(record))


def tensors_of(record: RecordDict) -> State:
    """Return the tensors of a message by name."""
    return {n: to_tensor(n, a.data, str(a.dtype), a.shape) for n, a in to_arrays(record).items()}


def to_tensor(name: str, data: bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """Convert bytes to a tensor. Raise RejectedMessageError unless the bytes match the shape and a supported type."""
    kind = _TYPES.get(dtype)
    if kind is None or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(data):
        raise RejectedMessageError(
            f"Expected `{name}` to have a supported type, and the number of bytes that the shape requires, but got "
            f"{len(data)} bytes of type {dtype:.40} and shape {shape}."
        )
    if kind is torch.bool and max(data, default=0) > 1:
        raise RejectedMessageError(
            f"Expected each byte of the boolean tensor `{name}` to be 0 or 1, but got another value."
        )
    numbers = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return numbers.reshape(tuple(shape))


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(state: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of the names, types, shapes and values of some tensors."""
    state_hash = hashlib.sha256()
    for name, value in sorted(state.items()):
        state_hash.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        state_hash.update(bytes_of(value))
    return state_hash.hexdigest()[:16]


def check_same(head: Mapping[str, Any], recipe: str, sender: str) -> None:
    """Raise RejectedMessageError if the sender of a message has another version of the library or another recipe."""
    for name, does, expected, mend in (
        ("version", "run lightning-fcl", __version__, "Install the same version on all machines."),
        ("recipe", "have the recipe with the fingerprint", recipe, "Deploy the same recipe on all machines."),
    ):
        if head.get(name) != expected:
            raise RejectedMessageError(
                f"Expected {sender} to {does} {expected}, but got {head.get(name)}.",
                hint=mend,
                argument=name,
                code=f"other-{name}",
            )


def check_names(names: Iterable[str], expected: Iterable[str], sender: str) -> None:
    """Raise RejectedMessageError unless the tensors of a message have exactly the expected names."""
    strange = sorted({*names} ^ {*expected})
    if strange:
        raise RejectedMessageError(
            f"Expected {sender} to send the tensors of this recipe's model, but {format_code_names(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} missing or unexpected.",
            hint="Deploy the same recipe on all machines.",
            code="other-model",
        )


def check_tensor(name: str, value: Tensor | Array, expected: Tensor, sender: str) -> None:
    """Raise RejectedMessageError if a tensor has another type or shape than expected."""
    if str(value.dtype) != str(expected.dtype) or tuple(value.shape) != tuple(expected.shape):
        raise RejectedMessageError(
            f"Expected `{name}` of {sender} to be {expected.dtype} of shape {tuple(expected.shape)}, but got "
            f"{value.dtype} of shape {tuple(value.shape)}.",
            hint="Deploy the same recipe on all machines.",
            code="other-model",
        )


class GridLink:
    """The server's connection to the nodes: sends parcels to nodes, and receives the answers.

    Nodes are identified by numbers.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # The time until which each message can be answered.
        self._until: dict[str, float] = {}
        # Requests for answers whose thread is still running, or whose result was not read yet.
        self._pulls: dict[str, Future[list[RecordDict | str]]] = {}

    def nodes(self) -> Mapping[int, str]:
        """Return the hash of each connected node's public key, by the number of the node.

        A node keeps its key when it reconnects. For a node without a key, the result has a text with the node's number.
        """
        return {
            node.node_id: hashlib.sha256(node.public_key).hexdigest() if node.public_key else f"node {node.node_id}"
            for node in self._grid.get_nodes()
        }

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> Mapping[str, int]:
        """Send one message to each node in ``parcels``, and return the nodes of the sent messages.

        Args:
            parcels: The parcel of each node.
            seconds: Number of seconds within which the nodes can answer.

        Returns:
            The node of each message, by the name of the message. Messages that could not be sent are missing.
        """
        message_of = require_package("flwr.app", *REQUIRED_FOR).Message
        messages = [
            message_of(to_record(parcel), node, "train" if parcel.state else "query", ttl=seconds)
            for node, parcel in parcels.items()
        ]
        # Flower returns no names if the messages are too large, and an empty name for a disconnected node.
        pushed = zip(self._grid.push_messages(messages), parcels, strict=False)
        node_by_message = {message: node for message, node in pushed if message}
        current_time = time.monotonic()
        self._until = {message: until for message, until in self._until.items() if until > current_time}
        self._until |= dict.fromkeys(node_by_message, current_time + seconds)
        self._pulls = {message: pull for message, pull in self._pulls.items() if message in self._until}
        return node_by_message

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """Yield the answers that have arrived, each as a pair: the name of the answered message, and the answer.

        If a message cannot be answered any more, or its answer is unreadable, the answer is a text with the reason.

        An answer has fields for the answered message and for the node. The sender of the answer writes these fields, so
        they can be false. Therefore each request to Flower is for the answer to one message. Each request runs in a
        thread, because Flower waits minutes for the rest of an incomplete answer.
        """
        for message in [*messages]:
            if message not in self._pulls:
                pull: Future[list[RecordDict | str]] = Future()
                self._pulls[message] = pull
                # A thread pool would wait at exit for requests that are still running. A daemon thread does not.
                threading.Thread(target=self._look, args=(message, pull), daemon=True).start()
                wait([pull], _PATIENCE)
            if self._pulls[message].done():
                yield from ((message, answer) for answer in self._pulls.pop(message).result())

    def _look(self, message: str, pull: Future[list[RecordDict | str]]) -> None:
        """Request the answer to a message, and set the result of ``pull``. An unreadable answer becomes a text."""
        try:
            answers = [
                sanitize_reason(f"Expected an answer, but Flower reports: {answer.error.reason}")
                if answer.has_error()
                else answer.content
                for answer in islice(self._grid.pull_messages([message]), 1)
            ]
        except BaseException as error:  # An answer of one node must not end the round.
            answers = [sanitize_reason(f"Expected a readable answer, but got {type(error).__name__}: {error}")]
        pull.set_result(answers)
