"""The way to the nodes, and who is there."""

from __future__ import annotations

import logging
import math
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


@dataclass
class Seen:
    """What is known of a node that is connected."""

    key: str
    client: str = ""  # that it says it is
    why: str = ""  # it is not let in
    there: bool = False  # whether it is let in
    alike: bool = False  # whether it has what never travels as the server has it
    asked: float = -math.inf  # when it was asked last who it is
    message: str = ""  # that asked it, and has no answer yet


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
        self._nodes: dict[int, Seen] = {}
        self.names: dict[str, str] = {}  # the clients', each by what it may be taken for
        self.samples: dict[str, int] = {}  # how many each client says it has

    def begin_round(self, hello: Mapping[str, Any], held: str) -> None:
        """What nodes are asked in this round; all of them where something else never travels."""
        self._hello = Parcel(hello)
        if held != self._held:
            self._held, self._nodes = held, {}

    def reach(self, wanted: Iterable[str], needed: int) -> dict[str, int]:
        """The nodes of clients that are there: as soon as there are enough, all that are."""
        wanted, ends, told = list(wanted), time.monotonic() + self._seconds, False
        while True:
            there = self.meet()
            found = {client: there[client] for client in wanted if client in there}
            over = time.monotonic() > ends
            unheard = any(one.message and not one.why for one in self._nodes.values())
            if len(found) >= needed and (over or not unheard):
                return found
            if over:
                reasons = "; ".join(dict.fromkeys(one.why for one in self._nodes.values() if one.why))
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
        now = time.monotonic()
        self._nodes = {node: self._nodes.get(node) or Seen(key) for node, key in self._link.nodes().items()}
        waiting = {one.message: node for node, one in self._nodes.items() if one.message}
        for message, answer in [*self._link.answers(waiting)] if waiting else ():
            self._welcome(waiting[message], answer)
        for node, one in self._nodes.items():
            if one.message and now - one.asked > HELLO_SECONDS:
                self._welcome(node, Sealed(failed=f"no answer within {HELLO_SECONDS:g} s"))
        strange = [node for node, one in sorted(self._nodes.items()) if not (one.there or one.message)]
        due = [node for node in strange if now - self._nodes[node].asked >= AGAIN_SECONDS]
        for node in due:
            self._nodes[node].asked = now
        for message, node in (self._link.send(dict.fromkeys(due, self._hello), HELLO_SECONDS) if due else {}).items():
            self._nodes[node].message = message
        return self._there()

    def _there(self) -> dict[str, int]:
        """The clients that are let in, and their nodes."""
        return {one.client: node for node, one in self._nodes.items() if one.there}

    @property
    def alike(self) -> set[int]:
        """The nodes that have what never travels as the server has it."""
        return {node for node, one in self._nodes.items() if one.alike}

    @property
    def claims(self) -> dict[str, list[str]]:
        """Of clients that several nodes say they are, these: first who is let in."""
        said = {client: [node] for client, node in self._there().items()}
        for node, one in self._nodes.items():
            if not one.there and one.client in said:
                said[one.client].append(node)
        return {client: [*map(str, nodes)] for client, nodes in said.items() if len(nodes) > 1}

    def _welcome(self, node: int, answer: Sealed) -> None:
        one, greeting = self._nodes[node], greeting_of(answer, self._recipe)
        before, one.message = (one.client, one.why), ""
        one.client = one.client if answer.failed else greeting.client
        one.why = greeting.fault or self._fault(node, one)
        if one.why:
            if (one.client, one.why) != before:
                log.warning("Refused node %d (client %s): %s", node, one.client or "unknown", one.why)
            return
        one.there, one.alike = True, greeting.held == self._held
        self._claimed[one.key] = one.client
        self.samples[one.client] = greeting.samples
        log.info("Client %s, which says that it has %d samples, is on node %d.", one.client, greeting.samples, node)

    def _fault(self, node: int, one: Seen) -> str:
        """Why a node may not be the client that it says it is; "": it may."""
        client, has = one.client, self._there().get(one.client)
        known, was = self.names.get(normal(client), client), self._claimed.get(one.key, client)
        if client != known:
            return f"Expected the name {known} but got {client}, which is the same once Unicode is normalised."
        if client != was:
            return f"Expected node {node} to be client {was}, as its key has been, but it says {client}."
        if has is not None:
            return (
                f"Expected one node for each client but got two for {client}: node {has} has it, and node {node} "
                f"says that it is {client}, too. Give each its own `client` in the node config. If it was started "
                "again, it is let in when the one before is no longer connected."
            )
        return ""

    def why_not(self, client: str) -> str:
        """Why a client is not among those that are there."""
        return next((one.why for one in self._nodes.values() if one.why and one.client == client), "not connected")
