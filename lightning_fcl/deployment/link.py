"""The way to the nodes over Flower's Message API."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING

from lightning_fcl.deployment.messages import FOR, Parcel, reason_of, record_of
from lightning_fcl.errors import require

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

_PATIENCE = 1.0  # seconds that others wait for an answer to come in


class GridLink:
    """Sends parcels to nodes, by their numbers, and brings their answers."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._until: dict[str, float] = {}  # how long each message is good for
        self._pulls: dict[str, Future[list[RecordDict | str]]] = {}  # the looks for answers that have not ended yet

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are connected now, and the name of each one's key, which it has also when it comes back."""
        return {
            node.node_id: sha256(node.public_key).hexdigest() if node.public_key else f"node {node.node_id}"
            for node in self._grid.get_nodes()
        }

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> Mapping[str, int]:
        """Send a parcel to each of some nodes, to be answered within so many seconds.

        Returns:
            The names of the messages, and to which node each goes; a node that is gone gets none.
        """
        message_of = require("flwr.app", *FOR).Message
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

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """What has come by now in answer to some messages, each with the name of the message that it answers.

        Of one that cannot be answered any more comes why, as text. It looks for one at a time: whom an answer says it
        comes from, and what it answers, its sender has written. And in a thread: where a sender is gone that has sent
        only a part, Flower waits minutes for the rest.
        """
        for message in [*messages]:
            if message not in self._pulls:
                found: Future[list[RecordDict | str]] = Future()
                self._pulls[message] = found
                # Nobody waits for it at the end, as one would for a pool's.
                threading.Thread(target=self._look, args=(message, found), daemon=True).start()
                wait([found], _PATIENCE)
            if self._pulls[message].done():
                yield from ((message, answer) for answer in self._pulls.pop(message).result())

    def _look(self, message: str, found: Future[list[RecordDict | str]]) -> None:
        """Find the answer, if there is one; what Flower cannot make a message of is none."""
        try:
            answers = [
                reason_of(f"Expected an answer but Flower says: {answer.error.reason}")
                if answer.has_error()
                else answer.content
                for answer in islice(self._grid.pull_messages([message]), 1)
            ]
        except BaseException as error:  # whatever a node has sent ends no other's round
            answers = [reason_of(f"Expected an answer that can be read but got {type(error).__name__}: {error}")]
        found.set_result(answers)
