"""The messages of a round: who is sent one, whose answer counts, and who is asked again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fcl.deployment.decoding import Sealed
from lightning_fcl.deployment.link import AGAIN_SECONDS, Link, Members
from lightning_fcl.deployment.parcel import Parcel

log = logging.getLogger(__name__)

_POLL = 0.05  # seconds between two looks for answers


@dataclass(frozen=True)
class Asked:
    """A message that has no answer yet: to which client it went, on which node, when, and its head."""

    client: str
    node: int
    when: float
    head: Mapping[str, Any]


class Gathering:
    """Sends clients their messages, and takes in their answers, as they come.

    It waits for all that are there when it begins, but no longer than its time once it has enough. Where those that
    are left are too few, it sends to whoever has come, or come back; again to who has not answered in its time, since
    an answer may be lost; and, after ever longer pauses, to those of whom no answer counts. They end nothing: after its
    time it does without them.

    Args:
        link: The way to the nodes.
        members: Who is there.
        seconds: It waits so long for all of them,
        longest: and then until there are enough, but no longer than this.
        parcel: Makes what a client on a node gets.
        take: Takes in a client's answer to a head, and says whether it counts.
    """

    def __init__(
        self,
        link: Link,
        members: Members,
        seconds: float,
        longest: float,
        parcel: Callable[[str, int], Parcel],
        take: Callable[[str, Sealed, Mapping[str, Any]], bool],
    ) -> None:
        self._link, self._members = link, members
        self._seconds, self._longest = seconds, longest
        self._parcel, self._take = parcel, take
        self._waiting: dict[str, Asked] = {}
        self._counted: set[str] = set()  # the clients of whom an answer counts
        self._refused: dict[str, float] = {}  # those who have answered, but none that counts: when each is asked again
        self._lost: dict[str, str] = {}
        self._wanted: Sequence[str] = ()
        self._needed, self._began = 1, 0.0

    @property
    def counted(self) -> int:
        return len(self._counted)

    @property
    def enough(self) -> bool:
        """Whether so many have answered as can be asked for: those of whom no answer counts are as if not wanted."""
        return self.counted >= max(1, min(self._needed, len(self._wanted) - len(self._refused)))

    def run(self, wanted: Sequence[str], needed: int) -> dict[str, str]:
        """Gather answers of some clients, until there are enough that count, or its time is over.

        Returns:
            The clients that have not answered, and why.
        """
        self._send(self._members.reach(wanted, needed))
        self._wanted, self._needed = wanted, needed
        self._began = asked = time.monotonic()
        while True:
            self._listen()
            now = time.monotonic()
            late = now - self._began > self._seconds
            if self.enough if late else self.counted >= needed and not self._waiting:
                break
            if len(self._refused) == len(wanted) or now - self._began > self._seconds + self._longest:
                break
            if now - asked >= AGAIN_SECONDS:
                asked, there = now, self._members.meet()
                self._give_up_gone(there)
                if late or self.counted + len(self._waiting) < needed:
                    self._send({client: there[client] for client in wanted if client in there})
            time.sleep(_POLL)
        return {
            client: self._why_not(client) for client in wanted if client not in self._counted | self._refused.keys()
        }

    def _send(self, nodes: Mapping[str, int]) -> None:
        now = time.monotonic()
        asked = self._counted | {one.client for one in self._waiting.values() if now - one.when <= self._seconds}
        asked |= {client for client, due in self._refused.items() if due > now}
        clients = {node: client for client, node in nodes.items() if client not in asked}
        if clients:
            parcels = {node: self._parcel(client, node) for node, client in clients.items()}
            sent = self._link.send(parcels, self._seconds + self._longest + 60)
            self._waiting |= {m: Asked(clients[node], node, now, parcels[node].head) for m, node in sent.items()}

    def _listen(self) -> None:
        asked = {**self._waiting}
        for message, answer in self._link.answers([*asked]) if asked else ():
            client, head = asked[message].client, asked[message].head
            self._waiting.pop(message, None)
            if answer.failed:
                self._lost[client] = answer.failed
                log.info("Client %s is lost: %s", client, answer.failed)
                continue
            if self._take(client, answer, head):
                self._counted.add(client)
                self._refused.pop(client, None)
            elif client not in self._counted:
                now = time.monotonic()
                self._refused[client] = now + AGAIN_SECONDS + now - self._began

    def _give_up_gone(self, there: Mapping[str, int]) -> None:
        """Wait no longer for nodes that are gone: of an answer that was under way Flower says so minutes later."""
        for message, one in [*self._waiting.items()]:
            if there.get(one.client) != one.node:
                del self._waiting[message]
                self._lost[one.client] = "its node has gone before it had answered"
                log.info("Client %s is lost: %s.", one.client, self._lost[one.client])

    def _why_not(self, client: str) -> str:
        if client in {one.client for one in self._waiting.values()}:
            return f"no answer within {self._seconds:g} s"
        return self._lost.get(client) or self._members.why_not(client)
