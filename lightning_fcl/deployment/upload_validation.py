"""What a client may answer: to hello, and to a download. What is not so is refused, for that client alone."""

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
"""A number of samples that nobody has."""

HEADER_FIELDS = ("federation", "round", "message")
"""What an answer repeats of the head of the message that it answers."""

_EXPLAINED = {
    "other-version": "The node and the server run different versions of lightning-fcl. Install one version everywhere.",
    "other-recipe": "The node and the server have different recipes. Deploy the same recipe on all machines.",
    "other-model": "The state that the server sends does not fit the model of the node. Deploy the same recipe on all "
    "machines.",
    "unnamed-client": "The node config does not name the client. Start the node with --node-config 'client=\"a\" ...'.",
    OTHER_ROUND: "The state of the client is of a later round than the server. Restore the server's newest checkpoint.",
    LOST_STATE: "The node has lost what the server sends once. The server sends it again.",
    UNUSABLE_DATA: "The node cannot use its data. Read the log of the node, and correct its data or its node config.",
}
_DETAILS = "Read the log of the node, which has the details."

_LONGEST = 230  # characters of a name, as a file's name has them
_SQUARES = torch.finfo(torch.float32).max  # what those of an entry's change may sum up to
_FURTHEST = {kind: float(torch.iinfo(kind).max >> 10) ** 2 for kind in (torch.int32, torch.int64)}


@dataclass(frozen=True)
class JoinRequest:
    """What a node says of itself."""

    client: str
    samples: int = 0  # that it has in all
    client_round_counts: object = ""  # a digest of what never travels
    error: str = ""  # why it is not welcome


@dataclass(frozen=True)
class Upload:
    """A client's answer to a download."""

    num_samples: int  # that it has trained on; 0: it has none in this round
    num_replay_samples: int = 0
    has_diverged: bool = False
    tensors: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors."""
        return sum(value.nbytes for value in self.tensors.values())


@dataclass(frozen=True)
class UploadLimits:
    """What a client may send."""

    max_message_bytes: int  # of its arrays
    max_samples: int  # that it may count as
    max_replay_samples: int  # remembered samples that it may count as
    max_update_norm: float  # of the server's `mean` entries: so many times the larger of their norm and 1
    num_clients: int = 1  # that are asked in the round


def parse_join_request(answer: RecordDict | str, recipe: str) -> JoinRequest:
    """What a node answers to hello, by the server's recipe's fingerprint: of whoever is not welcome, why.

    Args:
        answer: Its answer, or why there is none.
    """
    client = ""
    try:
        with as_rejection("a node"):
            if isinstance(answer, str):
                raise RejectedMessageError(answer)
            check_records(answer, 0, "an answer to hello")
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
    """Raise RejectedMessageError with the code of the error that a node has sent in place of an answer."""
    if "refused" not in head:
        return
    code, argument = str(head["refused"]), str(head.get("argument", ""))
    if not CODE.fullmatch(code) or (argument and not ARGUMENT.fullmatch(argument)):
        raise RejectedMessageError(
            f"Expected an error of {sender} to be a code and the name of an argument but got {code!r:.40} and "
            f"{argument!r:.40}."
        )
    argument_text = f" about `{argument}`" if argument else ""
    raise RejectedMessageError(
        f"Expected an answer of {sender} but got the error `{code}`{argument_text}. {_EXPLAINED.get(code, _DETAILS)}",
        argument=argument or None,
        code=code,
    )


def parse_int(head: Mapping[str, Any], name: str, minimum: int, maximum: int, hint: str = "") -> int:
    """Return a whole number of a head. Raise RejectedMessageError if it is not within the limits."""
    value = head.get(name)
    if type(value) is not int or not minimum <= value <= maximum:
        value_text = value if isinstance(value, int | float) and abs(value) < 1e30 else repr(value)[:40]
        raise RejectedMessageError(
            f"Expected `{name}` to be a whole number from {minimum} to {maximum} but got {value_text}.", hint=hint
        )
    return value


def parse_file_name(head: Mapping[str, Any], description: str) -> str:
    """A name of a head, which one file can have, and which may be taken for no other."""
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
            f"Expected the name of a {description}, not `..`, of letters that are printed, in Unicode's form NFKC, at "
            "most "
            f"{_LONGEST} as a file's name has them, but got {str(name)[:40]!r}.",
            hint=f"Use a shorter name of letters, digits, `_` and `-` for the {description}.",
        )
    return name


def parse_upload(
    answer: RecordDict, sent_header: Mapping[str, Any], client: str, server_state: State, limits: UploadLimits
) -> Upload:
    """Return what a client answers to a download.

    Args:
        answer: The answer.
        sent_header: The head of the message that it answers.
        client: The client.
        server_state: The server's entries that clients upload.
        limits: What a client may send.

    Raises:
        RejectedMessageError: If the answer is another one, or beyond the limits.
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
                    f"got {str(actual)[:40]!r}: it is old, or another's."
                )
        samples = parse_int(head, "samples", 0, limits.max_samples, _MORE)
        if samples == 0:
            return Upload(0)
        rehearsed = parse_int(head, "rehearsed", 0, limits.max_replay_samples, _MORE)
        return Upload(samples, rehearsed, head.get("diverged") is True, tensors_of(answer))


_MORE = "Set `max-samples` of the run's configuration if it has more than it said when it joined."


def decode_upload(
    upload: Upload, server: FederatedServer, client_rounds: ClientRounds, limits: UploadLimits
) -> Uploads:
    """Return the decoded upload of a client, whose numbers are within the limits.

    Args:
        upload: What the client has sent.
        server: The server.
        client_rounds: The client.
        limits: What a client may send.

    Raises:
        RejectedMessageError: If the upload cannot be decoded, or is beyond the limits.
    """
    (client,) = client_rounds.client_ids
    sender = f"client {client}"
    with as_rejection(sender):
        try:
            uploads = server.received(client_rounds, upload.tensors)
            server.decode(uploads)
        except InvalidValueError as error:
            raise RejectedMessageError(
                f"Expected {sender} to send the entries of this recipe's model. {error}",
                hint="Deploy the same recipe on all machines.",
                argument=error.argument,
                code="other-model",
            ) from error
        check_numbers(uploads, server.state, limits, sender)
    return uploads


def check_numbers(uploads: Uploads, server_state: State, limits: UploadLimits, sender: str) -> None:
    """Raise RejectedMessageError if sums with a decoded upload would overflow, or it is far from the server's state.

    Numbers that are not finite are left out: the server drops the upload, or they are the server's own.

    Args:
        uploads: The upload of one client.
        server_state: The server's state.
        limits: What a client may send.
        sender: The client, for messages.
    """
    changes = {name: squared_change(torch.zeros_like(value), value) for name, value in _updates(uploads).items()}
    for name, squares in changes.items():
        kind, reduction = server_state[name].dtype, uploads.reductions[name]
        max_squares = _FURTHEST.get(kind, _SQUARES)
        if not squares <= max_squares:
            raise RejectedMessageError(
                f"Expected `{name}` of {sender} to be at most {math.sqrt(max_squares):.2g} from the server's but it is "
                f"{math.sqrt(squares):.2g}, with which sums overflow.",
                hint="Decrease the learning rate.",
            )
        narrow = kind.itemsize <= 2 and kind not in (torch.bool, torch.bfloat16) and not kind.is_complex
        if narrow and reduction.additive and not reduction.weighted:
            info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
            room = (info.max - server_state[name].detach().cpu().double().abs()) / limits.num_clients
            if bool((uploads.update(name)[0].cpu().double().abs() > room).any()):
                raise RejectedMessageError(
                    f"Expected `{name}` of {sender} to leave room for the sum of {limits.num_clients} clients in "
                    f"{kind} "
                    "but it does not.",
                    hint="Use a wider type, such as float32 or int64.",
                )
    means = {name: squares for name, squares in changes.items() if uploads.reductions[name].averages}
    times = relative_update_norm({n: s for n, s in means.items() if server_state[n].is_floating_point()}, server_state)
    if not times <= limits.max_update_norm:
        raise RejectedMessageError(
            f"Expected an update of {sender} of at most {limits.max_update_norm:g} times the larger of the server's "
            f"norm and 1 but it is of {times:.3g} times.",
            hint="Decrease the learning rate, or increase `max-update-norm` in the run's configuration.",
        )


def _updates(uploads: Uploads) -> State:
    """Return the updates of one client in double precision."""
    updates: State = {}
    for name, value in uploads.values.items():
        wide = value[0].detach().cpu().to(torch.complex128 if value.is_complex() else torch.float64)
        origin = uploads.origins[name].detach().cpu()
        updates[name] = wide if uploads.are_updates else difference(wide, origin.to(wide.dtype))
    return updates
