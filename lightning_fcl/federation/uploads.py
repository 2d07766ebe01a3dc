"""Uploads: all tensors that clients send, and the transforms that change them.

An `Uploads` object contains each tensor that a client uploads in a round: the entries of the module, the entries that
the server keeps for a method, and the messages of methods. If several clients train vectorized, one object contains the
tensors of all these clients. The steps are identical in a simulation and on a node of a deployment:

=======================  ====================================================================================
Where                    Step
=======================  ====================================================================================
client                   `UploadTransform.encode` of each transform, first to last; then the bytes are counted
server, each upload      `UploadTransform.decode`, last to first; check for non-finite values; sum
server, sum of a round   `UploadTransform.on_sum`, last to first; division by the denominators
server, aggregate        `UploadTransform.on_aggregate`, first to last; server optimizer
=======================  ====================================================================================

With a transform that has ``sums_only`` (a mask), the server adds encoded values. In this case, the server does not
decode single uploads, does not check them for non-finite values, and does not scale stale uploads.

Client-local values are not part of an upload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.federation.accumulators import Accumulator, State
from lightning_fcl.federation.client_store import ClientState, StateSection
from lightning_fcl.federation.packing import pack_nonzero
from lightning_fcl.federation.reductions import Reduction

Messages = Mapping[str, Sequence[State]]
"""Messages of clients to methods, in addition to the entries.

Each section name of a method maps to a list with the tensors of each client.
"""

Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""A dictionary from tensor name to the dtype and the shape of the tensor."""


class Stage(IntEnum):
    """The position of a transform in the list of transforms. The positions in the list must be in ascending order."""

    COMPRESSION = 1
    CLIP = 2
    NOISE = 3
    MASK = 4
    COUNT = 5


class Code:
    """The encoded updates of several clients for one entry.

    Args:
        codec: The transform that decodes the updates.
        tensors: The tensors that are sent, by name, each of shape (clients, ...).
        reference: A tensor of the shape, dtype and device of one client's update.
    """

    def __init__(self, codec: UpdateCodec, tensors: State, reference: Tensor) -> None:
        self.codec, self.tensors, self.like = codec, tensors, reference

    def decoded(self) -> Tensor:
        """Return the decoded updates, shape (clients, ...)."""
        rows = self.codec.decompress(self.tensors, self.like)
        return rows.view(len(rows), *self.like.shape)


@dataclass(frozen=True)
class Setting:
    """The properties of the federation that each transform receives before a round.

    Args:
        state: The server's state at the start of the round.
        reductions: The reduction of each entry of the state.
        trainable: Names of the trainable parameters that clients upload.
        seed: The seed of the federation.
        round_idx: Index of the round, from 0.
        clients: All clients of the federation.
        senders: Sections of the methods whose clients send messages in addition to the entries.
        frozen: Names of frozen parameters. Clients upload them only if training changes them.
    """

    state: State
    reductions: Mapping[str, Reduction]
    trainable: Sequence[str]
    seed: int
    round_idx: int
    clients: Sequence[str]
    senders: Sequence[str] = ()
    frozen: Sequence[str] = ()

    @property
    def uploaded(self) -> list[str]:
        """Names of the entries that clients upload."""
        return [name for name in self.state if self.reductions[name].is_uploaded]

    @property
    def changing(self) -> list[str]:
        """Names of the entries that clients upload, without frozen parameters."""
        frozen = {*self.frozen}
        return [name for name in self.uploaded if name not in frozen]


class Uploads:
    """The uploads of several clients.

    Args:
        clients: The clients.
        weights: The weight of each client in means.
        reductions: The reduction of each entry.
        values: The entries, each of shape (clients, ...): states, or updates if ``are_updates``.
        origins: For each entry, the value that is subtracted from a client's value to get the update:
            `Reduction.empty_upload` of the state with which the client started. The value has the shape of one client's
            value, or the shape (clients, ...) if clients started with different states.
        are_updates: Whether ``values`` are updates, which are values minus origins.
        client_states: The state of each client at the start of the round, by section.

    Attributes:
        codes: Encoded entries, by name. These entries are not in ``values``.
        messages: Messages of clients to methods, in addition to the entries. Each section name of a method maps to a
            list with a dict of tensors for each client.
        unchanged: For each client, the names of the entries that are not sent, because they equal the server's state.
        memories: New states of transforms. Each section name maps to a list with a dict of tensors for each client.
            When the server has accepted an upload, these states replace the client's previous states.
        exchanged: For each client, the tensors that the client keeps until the round ends, from messages of transforms.
    """

    def __init__(
        self,
        clients: ClientRounds,
        weights: list[float],
        reductions: Mapping[str, Reduction],
        values: State,
        origins: State,
        are_updates: bool = False,
        client_states: Sequence[ClientState] = (),
    ) -> None:
        self.clients, self.weights, self.reductions, self.origins = clients, weights, reductions, origins
        self.values, self.are_updates, self.kept = values, are_updates, client_states
        self.codes: dict[str, Code] = {}
        self.messages: dict[str, list[State]] = {}
        self.unchanged: list[set[str]] = [set() for _ in weights]
        self.memories: dict[str, list[StateSection]] = {}
        self.exchanged: list[StateSection] = [{} for _ in weights]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def names(self) -> list[str]:
        """Names of all entries."""
        return [*self.values, *self.codes]

    def update(self, name: str) -> Tensor:
        """Return the updates of an entry, shape (clients, ...). Encoded updates are decoded."""
        if name in self.codes:
            return self.codes[name].decoded()
        return self.values[name] if self.are_updates else difference(self.values[name], self.origins[name])

    def state(self, name: str) -> Tensor:
        """Return the clients' values of an entry that is not encoded, shape (clients, ...).

        If ``are_updates``, the values are computed from the updates.
        """
        value = self.values[name]
        if not self.are_updates:
            return value
        origin = self.origins[name]
        return (origin.to(value.dtype) + value).to(origin.dtype)

    def set_update(self, name: str, update: Tensor) -> None:
        """Replace the updates of an entry that is not encoded."""
        self.values[name] = update if self.are_updates else self.origins[name] + update

    def norms(self) -> Tensor:
        """Return the joint L2 norm of each client's updates and messages, float64 of shape (clients,)."""
        squares = torch.zeros(len(self), dtype=torch.float64)
        for name in self.names:
            squares += _squares(self.update(name)).cpu()
        for client_messages in self.messages.values():
            squares += torch.stack(
                [sum((_squares(v[None])[0] for v in m.values()), squares.new_zeros(())).cpu() for m in client_messages]
            )
        return squares.sqrt()

    def scale(self, factors: Tensor) -> None:
        """Multiply each client's updates and messages by a factor. ``factors`` has shape (clients,).

        Scaled integers are rounded toward zero.
        """
        for name, value in self.values.items():
            self.set_update(name, _scaled(self.update(name), factors.to(value.device)))
        for code in self.codes.values():
            code.tensors = code.codec.scale(code.tensors, factors)
        for client_messages in self.messages.values():
            client_messages[:] = [
                {name: _scaled(value[None], factor[None].to(value.device))[0] for name, value in message.items()}
                for message, factor in zip(client_messages, factors, strict=True)
            ]

    def tensors(self) -> State:
        """Return all entries, each of shape (clients, ...). Tensors of an encoded entry are named ``NAME/TENSOR``."""
        coded = {f"{name}/{part}": value for name, code in self.codes.items() for part, value in code.tensors.items()}
        return {**self.values, **coded}

    def client_tensors(self, row: int) -> State:
        """Return the packed tensors that the client with index ``row`` sends, by name.

        The total size of these tensors is the size of the upload.
        """
        state = {
            name: self.reductions[name].pack(value[row])
            for name, value in self.values.items()
            if name not in self.unchanged[row]
        }
        for name, code in self.codes.items():
            state |= {f"{name}/{part}": value[row] for part, value in code.tensors.items()}
        for section, client_messages in self.messages.items():
            state |= {f"{section}/{name}": pack_nonzero(value) for name, value in client_messages[row].items()}
        return state

    def nbytes(self) -> list[int]:
        """Return the number of bytes that each client sends: the total size of the tensors in `client_tensors`."""
        reductions = self.reductions
        static_values = [value for name, value in self.values.items() if reductions[name].has_static_size]
        static_nbytes = sum(
            value[0].nbytes for value in [*static_values, *(v for c in self.codes.values() for v in c.tensors.values())]
        )
        packed = [name for name in self.values if not reductions[name].has_static_size]
        numbers = [static_nbytes] * len(self)
        if packed or self.messages or any(self.unchanged):
            for row, unchanged in enumerate(self.unchanged):
                changed_names = [name for name in packed if name not in unchanged]
                numbers[row] += sum(reductions[name].upload_nbytes(self.values[name][row]) for name in changed_names)
                numbers[row] -= sum(
                    self.values[name][row].nbytes for name in unchanged if reductions[name].has_static_size
                )
                messages = (value for each_client in self.messages.values() for value in each_client[row].values())
                numbers[row] += sum(pack_nonzero(value).nbytes for value in messages)
        return numbers


@dataclass
class Sums:
    """The sums of a round's updates, before each sum is divided by its denominator.

    Args:
        values: For each entry, the sum of the clients' updates. If the entry's reduction is ``weighted``, each update
            is multiplied by the client's weight. If a transform has ``sums_only``, the values are the result of the
            transform's accumulator until `UploadTransform.on_sum` decodes them.
        denominators: For each entry, the number by which the sum is divided: the sum of the weights, or 1 if the
            reduction is not ``weighted``. 0: the entry keeps the server's value.
        clients: Names of the clients whose uploads are in the sums.
        round: Index of the round, from 0.
    """

    values: State
    denominators: dict[str, float]
    clients: Sequence[str]
    round: int


class Exchange:
    """Messages of a transform between the server and the clients of a round, before or after the uploads.

    Args:
        clients: The clients.
        answers: Function that sends questions and returns the answers of the clients. `ask` calls this function.
    """

    def __init__(self, clients: Sequence[str], answers: Callable[[Mapping[str, State]], Mapping[str, State]]) -> None:
        self.clients, self._answers = clients, answers

    def ask(self, questions: Mapping[str, State]) -> Mapping[str, State]:
        """Send tensors to clients, and return the tensors of each client's answer.

        Args:
            questions: The tensors for each client, which are passed to `UploadTransform.answer`.
        """
        return self._answers(questions)


class UploadTransform:
    """A step that changes uploads on the clients, or that changes uploads, sums or the aggregate on the server.

    Override the functions that you need. `encode`, `decode`, `on_sum` and `on_aggregate` change an argument in place.
    Simulations and deployments call the same functions. Store client state in ``uploads.memories``. The server saves
    this client state if it accepts the upload.

    Example:
        >>> class Halved(UploadTransform):
        ...     stage = Stage.CLIP
        ...     needs_updates = True
        ...
        ...     def encode(self, uploads):
        ...         uploads.scale(torch.full((len(uploads),), 0.5))
    """

    label: ClassVar[str] = ""
    """The argument of the strategy that adds the transform, for messages. Empty: ``upload_transforms``."""

    stage: ClassVar[Stage]
    """The position of the transform in a list of transforms."""

    needs_updates: ClassVar[bool] = False
    """Whether clients send updates (the value minus the value at the start of the round) in place of states."""

    sums_only: ClassVar[bool] = False
    """Whether the server adds encoded values and does not decode single uploads.

    If True, override `make_accumulator` and `on_sum`.
    """

    keeps_state: ClassVar[bool] = False
    """Whether clients keep a state of the transform between rounds."""

    @property
    def server_entries(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Entries that the transform adds to the server's state: initial value and reduction by name."""
        return {}

    def setup(self, setting: Setting) -> None:
        """Prepare for a round. Called at the start of a fit, and before each round.

        Raises:
            InvalidValueError: If the transform cannot be applied to an entry.
        """

    def encode(self, uploads: Uploads) -> None:
        """Change the uploads on the client."""

    def before_upload(self, exchange: Exchange) -> None:
        """Exchange messages with the clients of the round before they train."""

    def answer(self, client: str, question: State, memory: StateSection) -> State:
        """Return a client's answer to a message of the server.

        Args:
            client: The client.
            question: The tensors that the server sent.
            memory: Tensors that the client keeps until the round ends. Change them in place. `encode` can read them
                from ``uploads.exchanged``.
        """
        return {}

    def after_upload(self, exchange: Exchange) -> None:
        """Exchange messages with the clients whose uploads were accepted."""

    def decode(self, uploads: Uploads) -> None:
        """Change received uploads on the server."""

    def make_accumulator(self) -> Accumulator:
        """Return a new accumulator that adds the encoded tensors of all entries in a round. See ``sums_only``."""
        raise NotImplementedError(f"Expected `{type(self).__name__}` with `sums_only` to define `make_accumulator`.")

    def on_sum(self, sums: Sums) -> None:
        """Change the sums of a round in place. Also called for a round without uploads."""

    def on_aggregate(self, previous_state: State, aggregate: State) -> None:
        """Change the new server state before the server optimizer uses it."""

    def commit_round(self) -> None:
        """Save the transform's state on the server, because the round is complete."""

    def roll_back_round(self) -> None:
        """Restore the transform's state on the server from before the round, because the round was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return the transform's state on the server, for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the arguments, which a checkpoint must match to be resumed."""
        return {"class": type(self).__name__, **{n: v for n, v in vars(self).items() if not n.startswith("_")}}


class UpdateCodec(UploadTransform, ABC):
    """A transform that encodes the updates of entries, and decodes them on the server."""

    stage = Stage.COMPRESSION

    linear: ClassVar[bool] = False
    """Whether the encoded form of a sum of updates is the sum of the encoded updates."""

    @abstractmethod
    def decompress(self, tensors: State, reference: Tensor) -> Tensor:
        """Return the decoded updates, shape (clients, n). ``reference`` has the shape and dtype of one update."""

    @abstractmethod
    def scale(self, tensors: State, factors: Tensor) -> State:
        """Return the encoded updates multiplied by each client's factor. ``factors`` has shape (clients,)."""

    @abstractmethod
    def forms(self, reference: Tensor) -> Forms:
        """Return the dtype and the shape of each tensor of an encoded update, by name.

        ``reference`` has the shape and dtype of one client's update.
        """

    @abstractmethod
    def codes(self, name: str, setting: Setting) -> bool:
        """Return whether the updates of an entry are encoded."""

    @abstractmethod
    def nbytes(self, n: int, itemsize: int) -> int:
        """Return the number of bytes of one client's encoded update of ``n`` numbers with ``itemsize`` bytes each."""

    def decode(self, uploads: Uploads) -> None:
        for name in [*uploads.codes]:
            uploads.set_update(name, uploads.codes.pop(name).decoded())

    def decode_sums(self, sums: Sums, setting: Setting) -> None:
        """Decode the sums of encoded updates. The encoding must be linear."""
        for name in (name for name in setting.uploaded if self.codes(name, setting)):
            reference = setting.state[name]
            parts = {part: sums.values.pop(f"{name}/{part}")[None] for part in self.forms(reference)}
            sums.values[name] = self.decompress(parts, reference)[0].view(reference.shape)


def difference(values: Tensor, origin: Tensor) -> Tensor:
    """Return ``values - origin``, and 0 for elements with a non-finite origin. Booleans are converted to integers."""
    if values.dtype == torch.bool:
        return values.to(torch.int8) - origin.to(torch.int8)
    result = values - origin
    if not origin.is_floating_point() and not origin.is_complex():
        return result
    finite = torch.isfinite(origin)
    return result if bool(finite.all()) else result.where(finite, 0)


def _squares(update: Tensor) -> Tensor:
    """Return the squared norm of each client's update in double precision, shape (clients,)."""
    rows = update.reshape(len(update), -1)
    if not (rows.is_floating_point() or rows.is_complex()):
        rows = rows.double()
    wide = torch.complex128 if rows.is_complex() else torch.float64
    squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=wide).square()
    return squares


def _scaled(update: Tensor, factors: Tensor) -> Tensor:
    column = factors.view(-1, *[1] * (update.dim() - 1))
    if update.is_floating_point() or update.is_complex():
        return update * column.to(update.dtype if update.is_floating_point() else torch.float64)
    return (update.double() * column).trunc().to(update.dtype)
