"""The way to the nodes, and who is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from lightning_fcl.deployment.answers import greeting_of, normal
from lightning_fcl.deployment.decoding import Sealed
from lightning_fcl.deployment.parcel import Parcel

log = logging.getLogger(__name__)

HELLO_SECONDS = 60.0
"""Seconds that a node has to say who it is."""


class Link(Protocol):
    """Sends parcels to nodes, by their numbers, and brings their answers."""

    def nodes(self) -> Iterable[int]:
        """The nodes that are connected now."""

    def ask(
        self, parcels: Mapping[int, Parcel], seconds: float, longest: float, enough: Callable[[], bool]
    ) -> Iterator[tuple[int, Sealed]]:
        """Send a parcel to each of some nodes, and yield their answers as they come, of which it reads nothing.

        Args:
            parcels: For each node what it gets.
            seconds: It waits so long for all of them,
            longest: and then until there is `enough`, but no longer than this.
            enough: Whether what has come is enough.
        """


class Members:
    """Which client is on which node: a node is asked once who it is."""

    def __init__(self, link: Link, recipe: str, seconds: float) -> None:
        self._link = link
        self._recipe = recipe
        self._seconds = seconds
        self._clients: dict[int, str] = {}
        self._refused: dict[int, tuple[str, str]] = {}  # the client that a node says it is, and why not
        self.alike: set[int] = set()  # the nodes that have what never travels as the server has it
        self._were: dict[int, str] = {}  # whose each node has been: a key that is registered is always one node
        self.names: dict[str, str] = {}  # the clients', each by what it may be taken for
        self.samples: dict[str, int] = {}  # how many each client says it has
        self._held = ""

    def reach(self, wanted: Iterable[str], needed: int, hello: Mapping[str, Any], held: str) -> dict[str, int]:
        """The nodes of clients that are there: as soon as there are enough, all that are."""
        wanted, ends, told = list(wanted), time.monotonic() + self._seconds, False
        if held != self._held:
            self._held, self._clients, self.alike = held, {}, set()
        while True:
            there = self._present(hello)
            found = {client: there[client] for client in wanted if client in there}
            if len(found) >= needed:
                return found
            if not told:
                log.info("Waiting for %d of the clients %s.", needed, ", ".join(wanted))
                told = True
            if time.monotonic() > ends:
                reasons = "; ".join(dict.fromkeys(why for _, why in self._refused.values()))
                raise RuntimeError(
                    f"Expected at least {needed} of the clients {', '.join(wanted)} within {self._seconds:g} s but got "
                    f"{', '.join(found) or 'none'}{f' ({reasons})' if reasons else ''}. Start their nodes, or lower "
                    "`clients-at-least` of the run's configuration."
                )
            time.sleep(0.2)

    def _present(self, hello: Mapping[str, Any]) -> dict[str, int]:
        connected = set(self._link.nodes())
        self._clients = {node: client for node, client in self._clients.items() if node in connected}
        self._refused = {node: why for node, why in self._refused.items() if node in connected}
        new = connected - self._clients.keys() - self._refused.keys()
        asked = {node: Parcel(hello) for node in sorted(new)}
        for node, answer in self._link.ask(asked, HELLO_SECONDS, 0, lambda: True) if asked else ():
            self._welcome(node, answer)
        return {client: node for node, client in self._clients.items()}

    def _welcome(self, node: int, answer: Sealed) -> None:
        greeting = greeting_of(answer, self._recipe)
        client, fault = greeting.client, greeting.fault
        known, same = self.names.get(normal(client), client), [n for n, c in self._clients.items() if c == client]
        if not fault and client != known:
            fault = f"Expected the name {known} but got {client}, which is the same once Unicode is normalised."
        if not fault and self._were.get(node, client) != client:
            fault = f"Expected node {node} to be client {self._were[node]}, as it has been, but it says {client}."
        if not fault and same:
            fault = (
                f"Expected one node for each client but got two for {client}: nodes {same[0]} and {node}. Give each "
                "its own `client` in the node config."
            )
        if fault:
            self._refused[node] = client, fault
            log.warning("Refused node %d (client %s): %s", node, client or "unknown", fault)
            return
        self._clients[node] = self._were[node] = client
        self.samples[client] = greeting.samples
        if greeting.held == self._held:
            self.alike.add(node)
        log.info("Client %s, which says that it has %d samples, is on node %d.", client, greeting.samples, node)

    def why_not(self, client: str) -> str:
        """Why a client is not among those that are there."""
        return next((why for who, why in self._refused.values() if who == client), "not connected")
