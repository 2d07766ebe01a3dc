"""A deployment's server and nodes as Flower apps, by its Message API."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.deployment.link import Lost
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.own_data import split_file
from lightning_fcl.deployment.parcel import BYTES, Parcel, RefusedError
from lightning_fcl.deployment.recipe import read_recipe
from lightning_fcl.errors import require

if TYPE_CHECKING:
    from flwr.app import Array, Context, Message, RecordDict
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


def parcel_of(record: RecordDict, limit: int = BYTES) -> Parcel:
    config = record.config_records.get("parcel")
    arrays: Mapping[str, Any] = record.array_records.get("arrays") or {}
    text = config.get("text") if config is not None else None
    if not isinstance(text, str):
        raise RefusedError("Expected a message of lightning-fcl but got another app's.")
    size = sum(max(len(array.data) - 256, 0) for array in arrays.values())
    if size > limit:
        raise RefusedError(
            f"Expected at most {limit} bytes but got {size}. Raise `message-bytes` of the run's configuration if the "
            "model is that large."
        )
    return Parcel.of_arrays(text, {name: _read(name, array) for name, array in arrays.items()})


def _read(name: str, array: Array) -> NDArray[Any]:
    """The numbers of an array, whose head may promise no more than there is."""
    file = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(file)
        head = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = head(file)
        if dtype.hasobject or fortran:
            raise ValueError(f"an array of {dtype}, stored by columns: {fortran}")
        return np.frombuffer(array.data, dtype, offset=file.tell()).reshape(shape)
    except (ValueError, KeyError) as error:
        raise RefusedError(f"Expected `{name}` to be an array of numbers but got {error}.") from error


class GridLink:
    """The way to the nodes over Flower."""

    def __init__(self, grid: Grid, limit: int) -> None:
        self._grid = grid
        self._limit = limit
        self._until: dict[str, float] = {}  # how long each message is good for
        self._pulls: dict[str, Future[Iterable[Message]]] = {}  # the looks for answers that have not ended yet

    def nodes(self) -> Iterable[int]:
        found: Iterable[int] = self._grid.get_node_ids()
        return found

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

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, Parcel | Lost]]:
        """What has come by now in answer to some messages, each with the name of the message that it answers.

        It looks for one at a time: whom an answer says it comes from, and what it answers, its sender has written. And
        in a thread: where a sender is gone that has sent only a part, Flower waits minutes for the rest.
        """
        for message in [*messages]:
            if message not in self._pulls:
                self._pulls[message] = _in_thread(self._grid.pull_messages, [message])
                wait([self._pulls[message]], _PATIENCE)
            if self._pulls[message].done():
                for answer in islice(self._pulls.pop(message).result(), 1):
                    yield message, self._answer(answer)

    def _answer(self, message: Message) -> Parcel | Lost:
        if message.has_error():
            return Lost(f"Expected an answer but Flower says: {message.error.reason:.500}")
        try:
            return parcel_of(message.content, self._limit)
        except RefusedError as error:
            return Parcel({"refused": str(error)})


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
    nodes: dict[tuple[str, str], Node] = {}
    sys.path.append(str(folder))  # classes of the recipe that lie beside it
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # else each round says that there is no GPU

    def answer(message: Message, context: Context) -> Message:
        reply: Message = require("flwr.app", *_FOR).Message(record_of(answered(message, context)), reply_to=message)
        return reply

    def answered(message: Message, context: Context) -> Parcel:
        try:
            client, data, memories = _own(context)
            parcel = parcel_of(message.content, int(context.run_config.get("message-bytes", BYTES)))
        except RefusedError as error:
            return Parcel({"refused": str(error)})
        if (client, data) not in nodes:
            nodes[client, data] = Node(read_recipe(folder / RECIPE), client, data, memories)
        return nodes[client, data].answer(parcel)

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
    ``clients-at-least``, ``round-seconds``, ``join-seconds`` and ``message-bytes``, which `Terms` explains.
    """
    app: ServerApp = require("flwr.serverapp", *_FOR).ServerApp()
    sys.path.append(str(folder))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from lightning_fcl.deployment.remote_round import Terms
        from lightning_fcl.deployment.resident import end_with_parent
        from lightning_fcl.deployment.serve import serve

        end_with_parent()
        said = context.run_config
        terms = Terms(
            int(said.get("clients-at-least", 1)),
            float(said.get("round-seconds", 600.0)),
            float(said.get("join-seconds", 600.0)),
            int(said.get("message-bytes", BYTES)),
        )
        logging.getLogger("lightning_fcl").setLevel(logging.INFO)
        data = str(said.get("data", "")) or None
        out = Path(str(said.get("out", "runs/deployed")))
        link = GridLink(grid, terms.message_bytes)
        serve(folder / RECIPE, link, out, terms, data, _names(said.get("clients", "")))

    return app
