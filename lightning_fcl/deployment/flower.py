"""A deployment's server and nodes as Flower apps, by its Message API."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_fcl.deployment.decoding import Sealed, opened, reason_of
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.own_data import split_file
from lightning_fcl.deployment.parcel import BYTES, Parcel, RefusedError
from lightning_fcl.deployment.recipe import read_recipe
from lightning_fcl.errors import require

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

log = logging.getLogger(__name__)

RECIPE = "recipe.yaml"
"""The recipe beside an app's files."""

_FOR = "runs federations on real machines", "flower"

_PATIENCE = 1.0  # seconds that others wait for an answer to come in

A = TypeVar("A")
T = TypeVar("T")


def record_of(parcel: Parcel) -> RecordDict:
    """A parcel as Flower sends it: arrays of numbers, and text."""
    app = require("flwr.app", *_FOR)
    arrays = app.ArrayRecord({name: app.Array(array) for name, array in parcel.arrays().items()})
    record: RecordDict = app.RecordDict({"parcel": app.ConfigRecord({"text": parcel.text()}), "arrays": arrays})
    return record


def sealed_of(record: RecordDict) -> Sealed:
    """What Flower has brought, of which nothing has been read."""
    config = record.config_records.get("parcel")
    arrays: Mapping[str, Any] = record.array_records.get("arrays") or {}
    text = config.get("text") if config is not None else None
    return Sealed(text, {name: array.data for name, array in arrays.items()})


class GridLink:
    """The way to the nodes over Flower."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._until: dict[str, float] = {}  # how long each message is good for
        self._pulls: dict[str, Future[Iterable[Message]]] = {}  # the looks for answers that have not ended yet

    def nodes(self) -> Mapping[int, str]:
        return {
            node.node_id: sha256(node.public_key).hexdigest() if node.public_key else f"node {node.node_id}"
            for node in self._grid.get_nodes()
        }

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> Mapping[str, int]:
        message_of = require("flwr.app", *_FOR).Message
        messages = [
            message_of(record_of(parcel), node, "train" if parcel.state else "query", ttl=seconds)
            for node, parcel in parcels.items()
        ]
        pushed = zip(self._grid.push_messages(messages), parcels, strict=False)  # none where they are too large
        sent = {message: node for message, node in pushed if message}
        now = time.monotonic()
        self._until = {message: until for message, until in self._until.items() if until > now}
        self._until |= dict.fromkeys(sent, now + seconds)
        self._pulls = {message: pull for message, pull in self._pulls.items() if message in self._until}
        return sent

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, Sealed]]:
        """What has come by now in answer to some messages, each with the name of the message that it answers.

        It looks for one at a time: whom an answer says it comes from, and what it answers, its sender has written. And
        in a thread: where a sender is gone that has sent only a part, Flower waits minutes for the rest.
        """
        for message in [*messages]:
            if message not in self._pulls:
                self._pulls[message] = _in_thread(self._grid.pull_messages, [message])
                wait([self._pulls[message]], _PATIENCE)
            if self._pulls[message].done():
                yield from ((message, answer) for answer in _found(self._pulls.pop(message)))


def _found(pull: Future[Iterable[Message]]) -> list[Sealed]:
    """The answer that a look has found, if there is one; what Flower cannot make a message of is none."""
    try:
        return [
            Sealed(failed=reason_of(f"Expected an answer but Flower says: {message.error.reason}"))
            if message.has_error()
            else sealed_of(message.content)
            for message in islice(pull.result(), 1)
        ]
    except Exception as error:  # whatever a node has sent ends no other's round
        said = f"Expected an answer that can be read but got {type(error).__name__}: {error}"
        return [Sealed(failed=reason_of(said))]


def _in_thread(work: Callable[[A], T], argument: A) -> Future[T]:
    """Do something in a thread for which nobody waits at the end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(argument))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def client_app(folder: Path) -> ClientApp:
    """The app of a node.

    Its node config names the ``client``, where its ``data`` are, and perhaps the folder of its ``memories``. In
    Flower's simulation, whose nodes have none, the run's configuration names the ``clients`` and their ``data-folder``.
    """
    app: ClientApp = require("flwr.clientapp", *_FOR).ClientApp()
    sys.path.append(str(folder))  # classes of the recipe that lie beside it
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # else each round says that there is no GPU

    def answer(message: Message, context: Context) -> Message:
        reply: Message = require("flwr.app", *_FOR).Message(record_of(answered(message, context)), reply_to=message)
        return reply

    def answered(message: Message, context: Context) -> Parcel:
        try:
            client, data, memories = _own(context)
            parcel = opened(sealed_of(message.content), int(context.run_config.get("message-bytes", BYTES)))
        except RefusedError as error:
            return Parcel({"refused": str(error)})
        return Node(read_recipe(folder / RECIPE), client, data, memories).answer(parcel)

    app.query()(answer)
    app.train()(answer)
    return app


def _own(context: Context) -> tuple[str, str, str | None]:
    """The client, its data and where it keeps its memories."""
    node, run = context.node_config, context.run_config
    names = _names(run.get("clients", ""))
    number = node.get("partition-id")
    client = str(node.get("client", ""))
    if not client and isinstance(number, int) and number < len(names):
        client = names[number]
    if not client:
        raise RefusedError(
            "Expected a node config that names the client and its data but got "
            f'{dict(node)}. Start the node with --node-config \'client="a" data="a.npz"\'.'
        )
    try:
        data = str(node.get("data") or split_file(Path(str(run.get("data-folder", ""))), client))
    except ValueError as error:
        raise RefusedError(str(error)) from error
    memories = node.get("memories") or run.get("memories") or None
    return client, data, None if memories is None else str(memories)


def _names(said: object) -> list[str]:
    return [name.strip() for name in str(said).split(",") if name.strip()]


def server_app(folder: Path) -> ServerApp:
    """The app of the server.

    The run's configuration says what is what: ``out``, the folder of results and checkpoints, from the newest of which
    it goes on; ``data``, what it tests on, and the names of the ``clients``, if these are not the recipe's; and
    ``clients-at-least``, ``round-seconds``, ``join-seconds``, ``message-bytes``, ``most-samples`` and
    ``largest-update``, which `Terms` explains.
    """
    app: ServerApp = require("flwr.serverapp", *_FOR).ServerApp()
    sys.path.append(str(folder))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from lightning_fcl.deployment.nodes import Terms
        from lightning_fcl.deployment.resident import end_with_parent
        from lightning_fcl.deployment.serve import serve

        end_with_parent()
        said = context.run_config
        told = {name: said[name.replace("_", "-")] for name in vars(Terms()) if name.replace("_", "-") in said}
        terms = Terms(**{name: type(vars(Terms())[name])(value) for name, value in told.items()})
        logging.getLogger("lightning_fcl").setLevel(logging.INFO)
        data = str(said.get("data", "")) or None
        out = Path(str(said.get("out", "runs/deployed")))
        link = GridLink(grid)
        serve(folder / RECIPE, link, out, terms, data, _names(said.get("clients", "")))

    return app
