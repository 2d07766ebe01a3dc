"""Messages as they are sent, over Flower, and as numbers again: within limits; what is wrong with one is a refusal."""

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
"""What Flower is for, and the extra that brings it."""

MAX_BYTES = 256 * 2**20
"""Bytes that the arrays of a message may have where nothing else was agreed."""

OTHER_ROUND, LOST_STATE, UNUSABLE_DATA = "other-round", "lost-state", "unusable-data"
"""Codes of a node's errors that a server explains. `check_same` and `check_names` have further codes."""

CODE, ARGUMENT = re.compile(r"[a-z][a-z-]{0,39}"), re.compile(r"[A-Za-z_][\w.\[\]-]{0,79}", re.ASCII)
"""Form of the code of an error that a node sends, and of the name of its argument."""

MODEL, SERVER = "model/", "server/"
"""What names of tensors begin with: of the model, and of what a server keeps for methods."""

_LETTERS = 20_000  # of a client's plain values, with their names
_LONGEST = 500  # characters of a reason
_PATIENCE = 1.0  # seconds that others wait for an answer to come in
_FORM = "bytes"  # how the arrays of a message are encoded
_NESTED = "nested"  # the plain value that holds those of the server's that are nested, as JSON

_PLAIN = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_TYPES = {str(dtype): dtype for dtype in _PLAIN}


class RejectedMessageError(InvalidValueError):
    """One side of a deployment does not go on with what the other has sent."""

    code = "refused"


@dataclass(frozen=True)
class Parcel:
    """A message between server and node: plain values, and tensors by name."""

    header: Mapping[str, Any]
    state: State = field(default_factory=dict)


def to_record(parcel: Parcel) -> RecordDict:
    """A parcel as Flower sends it, also where its numbers are NumPy's."""
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
    """The entries of a message as they came: the bytes of each, and of which type and shape it is said to be."""
    return record.array_records.get("arrays") or {}


def refusal_of(error: Exception) -> dict[str, str]:
    """Return what a node sends of an error: its code and the name of its argument.

    The text of an error can hold values of the node's data. It stays in the log of the node.
    """
    if not isinstance(error, LightningFCLError):
        return {"refused": "internal-error", "argument": ""}
    argument = error.argument or ""
    return {"refused": error.code, "argument": argument if ARGUMENT.fullmatch(argument) else ""}


def sanitize_reason(reason: object) -> str:
    """What another machine gives as its reason, as a line that can be logged and kept: what is printed, cut short."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(reason)[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


@contextmanager
def as_rejection(sender: str) -> Iterator[None]:
    """Let whatever goes wrong with a message be a refusal of it, with a reason that can be kept."""
    try:
        yield
    except RejectedMessageError as error:
        refusal = RejectedMessageError(sanitize_reason(error), argument=error.argument, code=error.code)
        refusal.hint = error.hint
        raise refusal from error
    except Exception as error:  # whatever a message makes of its reader, also RecursionError and MemoryError
        message = (
            f"Expected a message of {sender} that can be read but got {type(error).__name__}: {sanitize_reason(error)}"
        )
        raise RejectedMessageError(sanitize_reason(message)) from error


def check_records(record: RecordDict, limit: int, sender: str = "a message") -> None:
    """Raise RejectedMessageError unless a message has exactly the protocol's records, with at most ``limit`` bytes."""
    if len(record) != 2 or "head" not in record.config_records or "arrays" not in record.array_records:
        raise RejectedMessageError(
            f"Expected {sender} to have the records `head` and `arrays` of lightning-fcl but got {len(record)} records "
            f"({format_code_names(record)}). Start the app that `lightning-fcl deploy flower` has written."
        )
    if wrong_names := [name for name, array in to_arrays(record).items() if array.stype != _FORM]:
        raise RejectedMessageError(
            f"Expected the arrays of {sender} to be encoded as `{_FORM}` but {format_code_names(wrong_names)} are not."
        )
    size = sum(len(array.data) for array in to_arrays(record).values())
    if size > limit:
        raise RejectedMessageError(
            f"Expected at most {limit} bytes of {sender} but got {size}.",
            hint=f"If the model is that large, set `max-message-bytes` to at least {size} in the run's configuration.",
        )


def read_header(record: RecordDict, letters: int = _LETTERS) -> dict[str, Any]:
    """The plain values of a message, none of which is nested, and which have at most so many letters."""
    head = record.config_records["head"]
    wrong_names = [name for name, value in head.items() if not isinstance(value, str | int | float)]
    if wrong_names:
        raise RejectedMessageError(f"Expected text, numbers and truth values but `{wrong_names[0]}` is none of them.")
    size = sum(len(name) + len(value if isinstance(value, str) else " ") for name, value in head.items())
    if size > letters:
        raise RejectedMessageError(f"Expected a message's text to have at most {letters} letters but got {size}.")
    return dict(head)


def unpack(record: RecordDict, limit: int = MAX_BYTES) -> Parcel:
    """The parcel that a server's message holds, whose arrays have at most so many bytes."""
    with as_rejection("the server"):
        check_records(record, limit)
        head = read_header(record, limit)
        head |= json.loads(head.pop(_NESTED, "{}"))
        return Parcel(head, tensors_of(record))


def tensors_of(record: RecordDict) -> State:
    """Return the tensors of a message, by name."""
    return {n: to_tensor(n, a.data, str(a.dtype), a.shape) for n, a in to_arrays(record).items()}


def to_tensor(name: str, data: bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """The numbers of an entry of a type and shape, whose bytes may be neither more nor fewer than these take."""
    kind = _TYPES.get(dtype)
    if kind is None or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(data):
        raise RejectedMessageError(
            f"Expected `{name}` to be an array of numbers but got {len(data)} bytes as {dtype:.40} of shape {shape}."
        )
    if kind is torch.bool and max(data, default=0) > 1:
        raise RejectedMessageError(f"Expected `{name}` to be an array of numbers, true or false, but got others.")
    numbers = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return numbers.reshape(tuple(shape))


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(state: Mapping[str, Tensor]) -> str:
    """A short name of a state: another one has another name."""
    state_hash = hashlib.sha256()
    for name, value in sorted(state.items()):
        state_hash.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        state_hash.update(bytes_of(value))
    return state_hash.hexdigest()[:16]


def check_same(head: Mapping[str, Any], recipe: str, sender: str) -> None:
    """Refuse a message of another version of the library, or of another recipe."""
    for name, does, expected, mend in (
        ("version", "run lightning-fcl", __version__, "Install the same version on all machines."),
        ("recipe", "have the recipe", recipe, "Deploy the same recipe on all machines."),
    ):
        if head.get(name) != expected:
            raise RejectedMessageError(
                f"Expected {sender} to {does} {expected} but got {head.get(name)}.",
                hint=mend,
                argument=name,
                code=f"other-{name}",
            )


def check_names(names: Iterable[str], expected: Iterable[str], sender: str) -> None:
    """Refuse what is not sent under the names that are wanted."""
    strange = sorted({*names} ^ {*expected})
    if strange:
        raise RejectedMessageError(
            f"Expected {sender} to send the entries of this recipe's model but {format_code_names(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} missing or not among them.",
            hint="Deploy the same recipe on all machines.",
            code="other-model",
        )


def check_tensor(name: str, value: Tensor | Array, expected: Tensor, sender: str) -> None:
    """Refuse an entry of another type or shape."""
    if str(value.dtype) != str(expected.dtype) or tuple(value.shape) != tuple(expected.shape):
        raise RejectedMessageError(
            f"Expected `{name}` of {sender} to be {expected.dtype} of shape {tuple(expected.shape)} but got "
            f"{value.dtype} of shape {tuple(value.shape)}.",
            hint="Deploy the same recipe on all machines.",
            code="other-model",
        )


class GridLink:
    """Sends parcels to nodes, by their numbers, and brings their answers."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._until: dict[str, float] = {}  # how long each message is good for
        self._pulls: dict[str, Future[list[RecordDict | str]]] = {}  # the looks for answers that have not ended yet

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are connected now, and the name of each one's key, which it has also when it comes back."""
        return {
            node.node_id: hashlib.sha256(node.public_key).hexdigest() if node.public_key else f"node {node.node_id}"
            for node in self._grid.get_nodes()
        }

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> Mapping[str, int]:
        """Send a parcel to each of some nodes, to be answered within so many seconds.

        Returns:
            The names of the messages, and to which node each goes; a node that is gone gets none.
        """
        message_of = require_package("flwr.app", *REQUIRED_FOR).Message
        messages = [
            message_of(to_record(parcel), node, "train" if parcel.state else "query", ttl=seconds)
            for node, parcel in parcels.items()
        ]
        pushed = zip(self._grid.push_messages(messages), parcels, strict=False)  # none where they are too large
        node_by_message = {message: node for message, node in pushed if message}
        current_time = time.monotonic()
        self._until = {message: until for message, until in self._until.items() if until > current_time}
        self._until |= dict.fromkeys(node_by_message, current_time + seconds)
        self._pulls = {message: pull for message, pull in self._pulls.items() if message in self._until}
        return node_by_message

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """What has come by now in answer to some messages, each with the name of the message that it answers.

        Of one that cannot be answered any more comes why, as text. It looks for one at a time: whom an answer says it
        comes from, and what it answers, its sender has written. And in a thread: where a sender is gone that has sent
        only a part, Flower waits minutes for the rest.
        """
        for message in [*messages]:
            if message not in self._pulls:
                pull: Future[list[RecordDict | str]] = Future()
                self._pulls[message] = pull
                # Nobody waits for it at the end, as one would for a pool's.
                threading.Thread(target=self._look, args=(message, pull), daemon=True).start()
                wait([pull], _PATIENCE)
            if self._pulls[message].done():
                yield from ((message, answer) for answer in self._pulls.pop(message).result())

    def _look(self, message: str, pull: Future[list[RecordDict | str]]) -> None:
        """Find the answer, if there is one; what Flower cannot make a message of is none."""
        try:
            answers = [
                sanitize_reason(f"Expected an answer but Flower says: {answer.error.reason}")
                if answer.has_error()
                else answer.content
                for answer in islice(self._grid.pull_messages([message]), 1)
            ]
        except BaseException as error:  # whatever a node has sent ends no other's round
            answers = [sanitize_reason(f"Expected an answer that can be read but got {type(error).__name__}: {error}")]
        pull.set_result(answers)
