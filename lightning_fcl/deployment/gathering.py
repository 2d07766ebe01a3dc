"""The messages of a round: who is sent one, whose answer counts, and who is asked again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_fcl.deployment.link import AGAIN_SECONDS, Link, Lost, Members
from lightning_fcl.deployment.parcel import Parcel

log = logging.getLogger(__name__)

_POLL = 0.05  # seconds between two looks for answers


class Gathering:
    """Sends clients their messages, and takes in their answers, as they come.

    It waits for all that are there when it begins, but no longer than its time once it has enough. Where those that
    are left are too few, it sends to whoever has come, or come back.

    Args:
        link: The way to the nodes.
        members: Who is there.
        seconds: It waits so long for all of them,
        longest: and then until there are enough, but no longer than this.
        parcel: Makes what a client on a node gets.
        take: Takes in a client's answer, and says whether it counts.
    """

    def __init__(
        self,
        link: Link,
        members: Members,
        seconds: float,
        longest: float,
        parcel: Callable[[str, int], Parcel],
        take: Callable[[str, Parcel], bool],
    ) -> None:
        self._link, self._members = link, members
        self._seconds, self._longest = seconds, longest
        self._parcel, self._take = parcel, take
        self._waiting: dict[str, tuple[str, int]] = {}  # messages without an answer: to which client, on which node
        self._answered: set[str] = set()
        self._lost: dict[str, str] = {}
        self.counted = 0

    def run(self, wanted: Sequence[str], needed: int) -> dict[str, str]:
        """Gather answers of some clients, until there are enough that count, or its time is over.

        Returns:
            The clients that have not answered, and why.
        """
        self._send(self._members.reach(wanted, needed))
        began = asked = time.monotonic()
        while True:
            self._listen()
            now = time.monotonic()
            late = now - began > self._seconds
            if self.counted >= needed and (late or not self._waiting):
                break
            possible = len(wanted) - len(self._answered) + self.counted
            if possible < needed or now - began > self._seconds + self._longest:
                break
            if now - asked >= AGAIN_SECONDS:
                asked, there = now, self._members.meet()
                self._give_up_gone(there)
                if late or self.counted + len(self._waiting) < needed:
                    self._send({client: there[client] for client in wanted if client in there})
            time.sleep(_POLL)
        return {client: self._why_not(client) for client in wanted if client not in self._answered}

    def _send(self, nodes: Mapping[str, int]) -> None:
        asked = self._answered | {client for client, _ in self._waiting.values()}
        clients = {node: client for client, node in nodes.items() if client not in asked}
        if clients:
            parcels = {node: self._parcel(client, node) for node, client in clients.items()}
            sent = self._link.send(parcels, self._seconds + self._longest + 60)
            self._waiting |= {message: (clients[node], node) for message, node in sent.items()}

    def _listen(self) -> None:
        for message, answer in self._link.answers([*self._waiting]) if self._waiting else ():
            client, _ = self._waiting.pop(message)
            if isinstance(answer, Lost):
                self._lost[client] = answer.why
                log.info("Client %s is lost: %s", client, answer.why)
                continue
            self._answered.add(client)
            self.counted += self._take(client, answer)

    def _give_up_gone(self, there: Mapping[str, int]) -> None:
        """Wait no longer for nodes that are gone: of an answer that was under way Flower says so minutes later."""
        for message, (client, node) in [*self._waiting.items()]:
            if there.get(client) != node:
                del self._waiting[message]
                self._lost[client] = "its node has gone before it had answered"
                log.info("Client %s is lost: %s.", client, self._lost[client])

    def _why_not(self, client: str) -> str:
        if client in {client for client, _ in self._waiting.values()}:
            return f"no answer within {self._seconds:g} s"
        return self._lost.get(client) or self._members.why_not(client)
