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
    RefusedError,
    check_records,
    check_same,
    head_of,
    refusing,
    tensors_of,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.robust import change_of, times_moved
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Uploads, difference

if TYPE_CHECKING:
    from flwr.app import RecordDict

MOST = 2**31 - 1
"""A number of samples that nobody has."""

BOUND = ("federation", "round", "message")
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
class Greeting:
    """What a node says of itself."""

    client: str
    samples: int = 0  # that it has in all
    held: object = ""  # a digest of what never travels
    fault: str = ""  # why it is not welcome


@dataclass(frozen=True)
class Upload:
    """A client's answer to a download."""

    samples: int  # that it has trained on; 0: it has none in this round
    rehearsed: int = 0
    diverged: bool = False
    tensors: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors."""
        return sum(value.nbytes for value in self.tensors.values())


@dataclass(frozen=True)
class Limits:
    """What a client may send."""

    message_bytes: int  # of its arrays
    most_samples: int  # that it may count as
    most_rehearsed: int  # remembered samples that it may count as
    largest_update: float  # of the server's `mean` entries: so many times the larger of their norm and 1
    clients: int = 1  # that are asked in the round


def greeting_of(answer: RecordDict | str, recipe: str) -> Greeting:
    """What a node answers to hello, by the server's recipe's fingerprint: of whoever is not welcome, why.

    Args:
        answer: Its answer, or why there is none.
    """
    client = ""
    try:
        with refusing("a node"):
            if isinstance(answer, str):
                raise RefusedError(answer)
            check_records(answer, 0, "an answer to hello")
            head = head_of(answer)
            if "client" in head or "refused" not in head:
                client = file_name_of(head, "client")
            who = f"client {client}" if client else "a node"
            if "version" in head or "refused" not in head:
                check_same(head, recipe, who)
            _check_not_refused(head, who)
            return Greeting(client, whole(head, "samples", 0, MOST), head.get("held"))
    except RefusedError as error:
        return Greeting(client, fault=str(error))


def _check_not_refused(head: Mapping[str, Any], sender: str) -> None:
    """Raise RefusedError with the code of the error that a node has sent in place of an answer."""
    if "refused" not in head:
        return
    code, argument = str(head["refused"]), str(head.get("argument", ""))
    if not CODE.fullmatch(code) or (argument and not ARGUMENT.fullmatch(argument)):
        raise RefusedError(
            f"Expected an error of {sender} to be a code and the name of an argument but got {code!r:.40} and "
            f"{argument!r:.40}."
        )
    about = f" about `{argument}`" if argument else ""
    raise RefusedError(
        f"Expected an answer of {sender} but got the error `{code}`{about}. {_EXPLAINED.get(code, _DETAILS)}",
        argument=argument or None,
        code=code,
    )


def whole(head: Mapping[str, Any], name: str, least: int, most: int, hint: str = "") -> int:
    """Return a whole number of a head. Raise RefusedError if it is not within the limits."""
    value = head.get(name)
    if type(value) is not int or not least <= value <= most:
        said = value if isinstance(value, int | float) and abs(value) < 1e30 else repr(value)[:40]
        raise RefusedError(f"Expected `{name}` to be a whole number from {least} to {most} but got {said}.", hint=hint)
    return value


def file_name_of(head: Mapping[str, Any], what: str) -> str:
    """A name of a head, which one file can have, and which may be taken for no other."""
    name = head.get(what)
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or len(name) > _LONGEST
        or not name.isprintable()
        or not is_normalized("NFKC", name)
        or len(quote(name, safe="")) > _LONGEST
    ):
        raise RefusedError(
            f"Expected the name of a {what}, not `..`, of letters that are printed, in Unicode's form NFKC, at most "
            f"{_LONGEST} as a file's name has them, but got {str(name)[:40]!r}.",
            hint=f"Use a shorter name of letters, digits, `_` and `-` for the {what}.",
        )
    return name


def upload_of(answer: RecordDict, sent: Mapping[str, Any], client: str, known: State, limits: Limits) -> Upload:
    """Return what a client answers to a download.

    Args:
        answer: The answer.
        sent: The head of the message that it answers.
        client: The client.
        known: The server's entries that clients upload.
        limits: What a client may send.

    Raises:
        RefusedError: If the answer is another one, or beyond the limits.
    """
    who = f"client {client}"
    with refusing(who):
        check_records(answer, min(limits.message_bytes, sum(value.nbytes for value in known.values())), who)
        head = head_of(answer)
        _check_not_refused(head, who)
        for name, wanted in (("client", client), *((name, sent[name]) for name in BOUND)):
            said = head.get(name)
            if type(said) is not type(wanted) or said != wanted:
                raise RefusedError(
                    f"Expected an answer of client {client} to this round's download, with `{name}` {wanted!r}, but "
                    f"got {str(said)[:40]!r}: it is old, or another's."
                )
        samples = whole(head, "samples", 0, limits.most_samples, _MORE)
        if samples == 0:
            return Upload(0)
        rehearsed = whole(head, "rehearsed", 0, limits.most_rehearsed, _MORE)
        return Upload(samples, rehearsed, head.get("diverged") is True, tensors_of(answer))


_MORE = "Set `most-samples` of the run's configuration if it has more than it said when it joined."


def decode_upload(upload: Upload, server: FederatedServer, part: ClientRounds, limits: Limits) -> Uploads:
    """Return the decoded upload of a client, whose numbers are within the limits.

    Args:
        upload: What the client has sent.
        server: The server.
        part: The client.
        limits: What a client may send.

    Raises:
        RefusedError: If the upload cannot be decoded, or is beyond the limits.
    """
    (client,) = part.clients
    who = f"client {client}"
    with refusing(who):
        try:
            uploads = server.received(part, upload.tensors)
            server.decode(uploads)
        except InvalidValueError as error:
            raise RefusedError(
                f"Expected {who} to send the entries of this recipe's model. {error}",
                hint="Deploy the same recipe on all machines.",
                argument=error.argument,
                code="other-model",
            ) from error
        check_numbers(uploads, server.state, limits, who)
    return uploads


def check_numbers(uploads: Uploads, known: State, limits: Limits, sender: str) -> None:
    """Raise RefusedError if sums with a decoded upload would overflow, or if it is too far from the server's state.

    Numbers that are not finite are left out: the server drops the upload, or they are the server's own.

    Args:
        uploads: The upload of one client.
        known: The server's state.
        limits: What a client may send.
        sender: The client, for messages.
    """
    changes = {name: change_of(torch.zeros_like(value), value) for name, value in _updates(uploads).items()}
    for name, squares in changes.items():
        kind, reduction = known[name].dtype, uploads.reductions[name]
        most = _FURTHEST.get(kind, _SQUARES)
        if not squares <= most:
            raise RefusedError(
                f"Expected `{name}` of {sender} to be at most {math.sqrt(most):.2g} from the server's but it is "
                f"{math.sqrt(squares):.2g}, with which sums overflow.",
                hint="Decrease the learning rate.",
            )
        narrow = kind.itemsize <= 2 and kind not in (torch.bool, torch.bfloat16) and not kind.is_complex
        if narrow and reduction.additive and not reduction.weighted:
            info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
            room = (info.max - known[name].detach().cpu().double().abs()) / limits.clients
            if bool((uploads.update(name)[0].cpu().double().abs() > room).any()):
                raise RefusedError(
                    f"Expected `{name}` of {sender} to leave room for the sum of {limits.clients} clients in {kind} "
                    "but it does not.",
                    hint="Use a wider type, such as float32 or int64.",
                )
    means = {name: squares for name, squares in changes.items() if uploads.reductions[name].averages}
    times = times_moved({n: s for n, s in means.items() if known[n].is_floating_point()}, known)
    if not times <= limits.largest_update:
        raise RefusedError(
            f"Expected an update of {sender} of at most {limits.largest_update:g} times the larger of the server's "
            f"norm and 1 but it is of {times:.3g} times.",
            hint="Decrease the learning rate, or increase `largest-update` in the run's configuration.",
        )


def _updates(uploads: Uploads) -> State:
    """Return the updates of one client in double precision."""
    found: State = {}
    for name, value in uploads.values.items():
        wide = value[0].detach().cpu().to(torch.complex128 if value.is_complex() else torch.float64)
        origin = uploads.origins[name].detach().cpu()
        found[name] = wide if uploads.are_updates else difference(wide, origin.to(wide.dtype))
    return found
