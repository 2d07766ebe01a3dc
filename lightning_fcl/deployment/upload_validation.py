"""Validation of the answers of nodes. If an answer is invalid, the server rejects this answer only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unicodedata import is_normalized
from urllib.parse import quote

import torch

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.deployment.messages import (
    ARGUMENT,
    CODE,
    LOST_STATE,
    OTHER_ROUND,
    UNUSABLE_DATA,
    RejectedMessageError,
    as_rejection,
    check_records,
    check_same,
    read_header,
    tensors_of,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.robust import relative_update_norm, squared_change
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Uploads, difference

if TYPE_CHECKING:
    from flwr.app import RecordDict

MAX_INTEGER = 2**31 - 1
"""Upper limit for the number of samples that a client can report."""

HEADER_FIELDS = ("federation", "round", "message")
"""Header fields that an answer repeats from the message that it answers."""

_EXPLAINED = {
    "other-version": "The node and the server run different versions of lightning-fcl. Install one version everywhere.",
    "other-recipe": "The node and the server have different recipes. Deploy the same recipe on all machines.",
    "other-model": "The tensors from the server do not match the model of the node. Deploy the same recipe on all "
    "machines.",
    "unnamed-client": "The node config does not name the client. Start the node with --node-config 'client=\"a\" ...'. "
    "In Flower's simulation, set `clients` in the run configuration to the names of all clients.",
    OTHER_ROUND: "The state of the client is of a later round than the server. Restore the server's newest checkpoint.",
    LOST_STATE: "The node has lost tensors that the server sends only once. The server sends them again.",
    UNUSABLE_DATA: "The node cannot use its data. Read the log of the node, and correct its data or its node config.",
}
_DETAILS = "Read the log of the node, which has the details."

# Maximum number of characters in a name, so that the name is also a valid file name.
_LONGEST = 230
# Maximum squared norm of a tensor's update. The limit applies to all types except int32 and int64.
_SQUARES = torch.finfo(torch.float32).max
# Maximum squared norm of a tensor's update for the types int32 and int64.
_FURTHEST = {kind: float(torch.iinfo(kind).max >> 10) ** 2 for kind in (torch.int32, torch.int64)}


@dataclass(frozen=True)
class JoinRequest:
    """A node's answer to the question which client it trains.

    Attributes:
        client: Client that the node claims to be. Empty if it is unknown.
        samples: Number of samples of the client.
        client_round_counts: Digest of the node's initial values of tensors that are not transferred.
        error: Reason why the server ignores the node. Empty if the node is not ignored.
    """

    client: str
    samples: int = 0
    client_round_counts: object = ""
    error: str = ""


@dataclass(frozen=True)
class Upload:
    """A client's answer to a download.

    Attributes:
        num_samples: Number of samples that the client has trained on. 0: the client has no samples in this round.
        num_replay_samples: Number of replay samples that the client has trained on.
        has_diverged: Whether the loss of the client was non-finite in a step.
        tensors: The tensors of the upload by name.
    """

    num_samples: int
    num_replay_samples: int = 0
    has_diverged: bool = False
    tensors: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors."""
        return sum(value.nbytes for value in self.tensors.values())


@dataclass(frozen=True)
class UploadLimits:
    """Limits of a client's upload.

    Attributes:
        max_message_bytes: Maximum size of the tensors in bytes.
        max_samples: Maximum number of samples.
        max_replay_samples: Maximum number of replay samples.
        max_update_norm: Maximum norm of the update, as a multiple of the larger of 1 and the norm of the server's
            averaged tensors.
        num_clients: Number of the sampled clients in the round.
    """

    max_message_bytes: int
    max_samples: int
    max_replay_samples: int
    max_update_norm: float
    num_clients: int = 1


def parse_join_request(answer: RecordDict | str, recipe: str) -> JoinRequest:
    """Return a node's answer to the question which client it trains. For an invalid answer, the result has an error.

    Args:
        answer: Answer of the node, or the reason why there is no answer.
        recipe: Fingerprint of the server's recipe.
    """
    client = ""
    try:
        with as_rejection("a node"):
            if isinstance(answer, str):
                raise RejectedMessageError(answer)
            check_records(answer, 0, "a node")
            head = read_header(answer)
            if "client" in head or "refused" not in head:
                client = parse_file_name(head, "client")
            sender = f"client {client}" if client else "a node"
            if "version" in head or "refused" not in head:
                check_same(head, recipe, sender)
            _check_not_refused(head, sender)
            return JoinRequest(client, parse_int(head, "samples", 0, MAX_INTEGER), head.get("held"))
    except RejectedMessageError as error:
        return JoinRequest(client, error=str(error))


def _check_not_refused(head: Mapping[str, Any], sender: str) -> None:
    """Raise RejectedMessageError if a node has sent the code of an error."""
    if "refused" not in head:
        return
    code, argument = str(head["refused"]), str(head.get("argument", ""))
    if not CODE.fullmatch(code) or (argument and not ARGUMENT.fullmatch(argument)):
        raise RejectedMessageError(
            f"Expected an error of {sender} to be a code and the name of an argument, but got {code!r:.40} and "
            f"{argument!r:.40}."
        )
    argument_text = f" about `{argument}`" if argument else ""
    raise RejectedMessageError(
        f"Expected an answer of {sender}, but got the error `{code}`{argument_text}. {_EXPLAINED.get(code, _DETAILS)}",
        argument=argument or None,
        code=code,
    )


def parse_int(head: Mapping[str, Any], name: str, minimum: int, maximum: int, hint: str = "") -> int:
    """Return an integer from a header. Raise RejectedMessageError if the value is missing, invalid or out of range."""
    value = head.get(name)
    if type(value) is not int or not minimum <= value <= maximum:
        value_text = value if isinstance(value, int | float) and abs(value) < 1e30 else repr(value)[:40]
        raise RejectedMessageError(
            f"Expected `{name}` to be a whole number from {minimum} to {maximum}, but got {value_text}.", hint=hint
        )
    return value


def parse_file_name(head: Mapping[str, Any], description: str) -> str:
    """Return a name from a header. Raise RejectedMessageError if it cannot be a file name in Unicode form NFKC.

    Args:
        head: The header.
        description: Name of the header field. It is used in the error message.
    """
    name = head.get(description)
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or len(name) > _LONGEST
        or not name.isprintable()
        or not is_normalized("NFKC", name)
        or len(quote(name, safe="")) > _LONGEST
    ):
        raise RejectedMessageError(
            f"Expected the name of a {description} to be 1 to {_LONGEST} printable characters in Unicode form NFKC, at "
            f"most {_LONGEST} characters after percent-encoding, and not `.` or `..`, but got {str(name)[:40]!r}.",
            hint=f"Use a name of at most {_LONGEST} ASCII letters, digits, `_` and `-` for the {description}.",
        )
    return name


def parse_upload(
    answer: RecordDict, sent_header: Mapping[str, Any], client: str, server_state: State, limits: UploadLimits
) -> Upload:
    """Validate a client's answer to a download, and return the upload.

    Args:
        answer: The answer.
        sent_header: Header of the message that the client answers.
        client: Name of the client.
        server_state: The server's tensors that clients upload.
        limits: Limits of the upload.

    Raises:
        RejectedMessageError: If the answer is for another message, contains an error, or exceeds the limits.
    """
    sender = f"client {client}"
    with as_rejection(sender):
        check_records(
            answer, min(limits.max_message_bytes, sum(value.nbytes for value in server_state.values())), sender
        )
        head = read_header(answer)
        _check_not_refused(head, sender)
        for name, expected in (("client", client), *((name, sent_header[name]) for name in HEADER_FIELDS)):
            actual = head.get(name)
            if type(actual) is not type(expected) or actual != expected:
                raise RejectedMessageError(
                    f"Expected an answer of client {client} to this round's download, with `{name}` {expected!r}, but "
                    f"got {str(actual)[:40]!r}. The answer belongs to another message or client."
                )
        samples = parse_int(head, "samples", 0, limits.max_samples, _MORE)
        if samples == 0:
            return Upload(0)
        rehearsed = parse_int(head, "rehearsed", 0, limits.max_replay_samples, _MORE)
        return Upload(samples, rehearsed, head.get("diverged") is True, tensors_of(answer))


_MORE = "If the client has more samples, set `max-samples` in the run configuration to a larger number."


def decode_upload(
    upload: Upload, server: FederatedServer, client_rounds: ClientRounds, limits: UploadLimits
) -> Uploads:
    """Return the decoded upload of a client, and check its values.

    Args:
        upload: Upload of the client.
        server: The server.
        client_rounds: The client's round.
        limits: Limits of the upload.

    Raises:
        RejectedMessageError: If the upload cannot be decoded, or exceeds the limits.
    """
    (client,) = client_rounds.client_ids
    sender = f"client {client}"
    with as_rejection(sender):
        try:
            uploads = server.received(client_rounds, upload.tensors)
            server.decode(uploads)
        except InvalidValueError as error:
            raise RejectedMessageError(
                f"Expected {sender} to send the tensors of this recipe's model. {error}",
                hint="Deploy the same recipe on all machines.",
                argument=error.argument,
                code="other-model",
            ) from error
        check_numbers(uploads, server.state, limits, sender)
    return uploads


def check_numbers(uploads: Uploads, server_state: State, limits: UploadLimits, sender: str) -> None:
    """Raise RejectedMessageError if sums of such uploads can overflow, or if the norm of the update is too large.

    Non-finite values are ignored here. The server drops uploads with non-finite values, unless the server's own values
    are also non-finite.

    Args:
        uploads: Decoded upload of one client.
        server_state: State of the server.
        limits: Limits of the upload.
        sender: Name of the client, for messages.
    """
    changes = {name: squared_change(torch.zeros_like(value), value) for name, value in _updates(uploads).items()}
    for name, squares in changes.items():
        kind, reduction = server_state[name].dtype, uploads.reductions[name]
        max_squares = _FURTHEST.get(kind, _SQUARES)
        if not squares <= max_squares:
            raise RejectedMessageError(
                f"Expected the update of `{name}` of {sender} to have a norm of at most {math.sqrt(max_squares):.2g}, "
                f"but got {math.sqrt(squares):.2g}. Sums of such updates can overflow.",
                hint="Decrease the learning rate.",
            )
        narrow = kind.itemsize <= 2 and kind not in (torch.bool, torch.bfloat16) and not kind.is_complex
        if narrow and reduction.additive and not reduction.weighted:
            info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
            room = (info.max - server_state[name].detach().cpu().double().abs()) / limits.num_clients
            if bool((uploads.update(name)[0].cpu().double().abs() > room).any()):
                raise RejectedMessageError(
                    f"Expected the update of `{name}` of {sender} to be small enough for a sum of {limits.num_clients} "
                    f"client{'' if limits.num_clients == 1 else 's'} in {kind}, but it is too large.",
                    hint="Use a wider type, such as float32 or int64.",
                )
    means = {name: squares for name, squares in changes.items() if uploads.reductions[name].averages}
    times = relative_update_norm({n: s for n, s in means.items() if server_state[n].is_floating_point()}, server_state)
    if not times <= limits.max_update_norm:
        raise RejectedMessageError(
            f"Expected the norm of an update of {sender} to be at most {limits.max_update_norm:g} times the larger of "
            f"1 and the norm of the server's averaged tensors, but got {times:.3g} times.",
            hint="Decrease the learning rate, or increase `max-update-norm` in the run configuration.",
        )


def _updates(uploads: Uploads) -> State:
    """Return the updates of one client in double precision, by name."""
    updates: State = {}
    for name, value in uploads.values.items():
        wide = value[0].detach().cpu().to(torch.complex128 if value.is_complex() else torch.float64)
        origin = uploads.origins[name].detach().cpu()
        updates[name] = wide if uploads.are_updates else difference(wide, origin.to(wide.dtype))
    return updates
