"""The way to the nodes, and who is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_fcl.deployment.answers import greeting_of, normal
from lightning_fcl.deployment.decoding import Sealed
from lightning_fcl.deployment.parcel import Parcel

log = logging.getLogger(__name__)

HELLO_SECONDS = 60.0
"""Seconds that a node has to say who it is."""

AGAIN_SECONDS = 3.0
"""Seconds after which a node that was refused, or a client that was lost in a round, is asked again."""

_LOOK = 0.2  # seconds between two looks at who is there


class Link(Protocol):
    """Sends parcels to nodes, by their numbers, and brings their answers."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are connected now, and the name of each one's key, which it has also when it comes back."""

    def send(self, parcels: Mapping[int, Parcel], seconds: float) -> Mapping[str, int]:
        """Send a parcel to each of some nodes, to be answered within so many seconds.

        Returns:
            The names of the messages, and to which node each goes; a node that is gone gets none.
        """

    def answers(self, messages: Collection[str]) -> Iterator[tuple[str, Sealed]]:
        """What has come by now in answer to some messages, each with the name of the message that it answers.

        Of one that cannot be answered any more it says so: it has ``failed``.
        """


@dataclass(frozen=True)
class Refusal:
    """A node that is not let in: the client that it says it is, "" where it has not said so, and why not."""

    client: str
    why: str


class Members:
    """Which client is on which node: a node is asked who it is until it is let in.

    Args:
        link: The way to the nodes.
        recipe: The recipe's fingerprint.
        seconds: So long `reach` waits.
        claimed: Whose each key has been, by its name: it stays that client's.
    """

    def __init__(self, link: Link, recipe: str, seconds: float, claimed: dict[str, str]) -> None:
        self._link = link
        self._recipe = recipe
        self._seconds = seconds
        self._claimed = claimed
        self._hello, self._held = Parcel({}), ""
        self._clients: dict[int, str] = {}
        self._refused: dict[int, Refusal] = {}
        self._asked: dict[int, float] = {}  # when each node was asked last who it is
        self._greetings: dict[str, int] = {}  # the messages that have no answer yet, and to which node they went
        self.alike: set[int] = set()  # the nodes that have what never travels as the server has it
        self.claims: dict[str, list[str]] = {}  # of clients that several nodes say they are, these: first who is let in
        self._keys: Mapping[int, str] = {}
        self.names: dict[str, str] = {}  # the clients', each by what it may be taken for
        self.samples: dict[str, int] = {}  # how many each client says it has

    def begin_round(self, hello: Mapping[str, Any], held: str) -> None:
        """What nodes are asked in this round; all of them where something else never travels."""
        self._hello = Parcel(hello)
        if held != self._held:
            self._held, self._clients, self._refused, self._asked, self._greetings = held, {}, {}, {}, {}

    def reach(self, wanted: Iterable[str], needed: int) -> dict[str, int]:
        """The nodes of clients that are there: as soon as there are enough, all that are."""
        wanted, ends, told = list(wanted), time.monotonic() + self._seconds, False
        while True:
            there = self.meet()
            found = {client: there[client] for client in wanted if client in there}
            over = time.monotonic() > ends
            if len(found) >= needed and (over or self._refused.keys() >= {*self._greetings.values()}):
                return found
            if over:
                reasons = "; ".join(dict.fromkeys(refusal.why for refusal in self._refused.values()))
                raise RuntimeError(
                    f"Expected at least {needed} of the clients {', '.join(wanted)} within {self._seconds:g} s but got "
                    f"{', '.join(found) or 'none'}{f' ({reasons})' if reasons else ''}. Start their nodes, or lower "
                    "`clients-at-least` of the run's configuration."
                )
            if len(found) < needed and not told:
                missing = [f"{client} ({self.why_not(client)})" for client in wanted if client not in found]
                log.info("Waiting for %d of the clients %s.", needed - len(found), ", ".join(missing))
                told = True
            time.sleep(_LOOK)

    def meet(self) -> dict[str, int]:
        """The clients that are there now, and their nodes; those that are new, or were refused, are asked."""
        self._keys = self._link.nodes()
        now, connected = time.monotonic(), self._keys.keys()
        self._clients = {node: client for node, client in self._clients.items() if node in connected}
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in connected}
        self._asked = {node: when for node, when in self._asked.items() if node in connected}
        self._greetings = {message: node for message, node in self._greetings.items() if node in connected}
        for message, answer in [*self._link.answers(self._greetings)] if self._greetings else ():
            self._welcome(self._greetings.pop(message), answer)
        for message, node in [*self._greetings.items()]:
            if now - self._asked[node] > HELLO_SECONDS:
                self._welcome(self._greetings.pop(message), Sealed(failed=f"no answer within {HELLO_SECONDS:g} s"))
        strange = connected - self._clients.keys() - {*self._greetings.values()}
        due = [node for node in sorted(strange) if now - self._asked.get(node, -AGAIN_SECONDS) >= AGAIN_SECONDS]
        if due:
            self._asked |= dict.fromkeys(due, now)
            self._greetings |= self._link.send(dict.fromkeys(due, self._hello), HELLO_SECONDS)
        self.claims = {}
        for node, client in self._clients.items():
            also = [other for other, refusal in self._refused.items() if refusal.client == client]
            if also:
                self.claims[client] = [str(one) for one in (node, *also)]
        return {client: node for node, client in self._clients.items()}

    def _welcome(self, node: int, answer: Sealed) -> None:
        greeting, before = greeting_of(answer, self._recipe), self._refused.get(node, Refusal("", ""))
        client, fault = before.client if answer.failed else greeting.client, greeting.fault
        known, same = self.names.get(normal(client), client), [n for n, c in self._clients.items() if c == client]
        if not fault and client != known:
            fault = f"Expected the name {known} but got {client}, which is the same once Unicode is normalised."
        if not fault and (was := self._claimed.get(self._keys[node], client)) != client:
            fault = f"Expected node {node} to be client {was}, as its key has been, but it says {client}."
        if not fault and same:
            fault = (
                f"Expected one node for each client but got two for {client}: node {same[0]} has it, and node {node} "
                f"says that it is {client}, too. Give each its own `client` in the node config. If it was started "
                "again, it is let in when the one before is no longer connected."
            )
        if fault:
            self._refused[node] = Refusal(client, fault)
            if self._refused[node] != before:
                log.warning("Refused node %d (client %s): %s", node, client or "unknown", fault)
            return
        self._refused.pop(node, None)
        self._clients[node] = self._claimed[self._keys[node]] = client
        self.samples[client] = greeting.samples
        if greeting.held == self._held:
            self.alike.add(node)
        else:
            self.alike.discard(node)
        log.info("Client %s, which says that it has %d samples, is on node %d.", client, greeting.samples, node)

    def why_not(self, client: str) -> str:
        """Why a client is not among those that are there."""
        return next((one.why for one in self._refused.values() if one.client == client), "not connected")
