"""Which client is on which node, and a round's messages: who is sent one, whose answer counts, who is asked again."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_fcl.deployment.answers import greeting_of
from lightning_fcl.deployment.messages import Parcel, Sealed

if TYPE_CHECKING:
    from lightning_fcl.deployment.link import GridLink

log = logging.getLogger(__name__)

HELLO_SECONDS = 60.0
"""Seconds that a node has to say who it is."""

AGAIN_SECONDS = 3.0
"""Seconds after which a node that was refused, or a client that was lost in a round, is asked again."""

_LOOK = 0.2  # seconds between two looks at who is connected, or for answers


@dataclass
class Seen:
    """What is known of a node that is connected."""

    key: str
    client: str = ""  # that it says it is
    why: str = ""  # it is not let in
    let_in: bool = False
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
        registered: Whether all keys are registered with the SuperLink: a client's name then stays its key's as well.
    """

    def __init__(
        self, link: GridLink, recipe: str, seconds: float, claimed: dict[str, str], registered: bool = False
    ) -> None:
        self._link, self._recipe, self._seconds = link, recipe, seconds
        self._claimed, self._registered = claimed, registered
        self._hello, self._held = Parcel({}), ""
        self._nodes: dict[int, Seen] = {}
        self.samples: dict[str, int] = {}  # how many each client says it has

    def begin_round(self, hello: Mapping[str, Any], held: str) -> None:
        """What nodes are asked in this round; all of them where something else never travels."""
        self._hello = Parcel(hello)
        if held != self._held:
            self._held, self._nodes = held, {}

    def reach(self, wanted: Sequence[str], needed: int) -> dict[str, int]:
        """The nodes of clients that are there: as soon as there are enough, all that are."""
        ends, logged = time.monotonic() + self._seconds, False
        while True:
            nodes = self.meet()
            found = {client: nodes[client] for client in wanted if client in nodes}
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
            if len(found) < needed and not logged:
                missing = [f"{client} ({self.why_not(client)})" for client in wanted if client not in found]
                log.info("Waiting for %d of the clients %s.", needed - len(found), ", ".join(missing))
                logged = True
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
        strange = [node for node, one in sorted(self._nodes.items()) if not (one.let_in or one.message)]
        due = [node for node in strange if now - self._nodes[node].asked >= AGAIN_SECONDS]
        for node in due:
            self._nodes[node].asked = now
        for message, node in (self._link.send(dict.fromkeys(due, self._hello), HELLO_SECONDS) if due else {}).items():
            self._nodes[node].message = message
        return self._let_in()

    def _let_in(self) -> dict[str, int]:
        return {one.client: node for node, one in self._nodes.items() if one.let_in}

    @property
    def alike(self) -> set[int]:
        """The nodes that have what never travels as the server has it."""
        return {node for node, one in self._nodes.items() if one.alike}

    @property
    def claims(self) -> dict[str, list[str]]:
        """Of clients that several nodes say they are, these: first who is let in."""
        said = {client: [node] for client, node in self._let_in().items()}
        for node, one in self._nodes.items():
            if not one.let_in and one.client in said:
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
        one.let_in, one.alike = True, greeting.held == self._held
        self._claimed[one.key] = one.client
        self.samples[one.client] = greeting.samples
        log.info("Client %s, which says that it has %d samples, is on node %d.", one.client, greeting.samples, node)

    def _fault(self, node: int, one: Seen) -> str:
        """Why a node may not be the client that it says it is; "": it may."""
        client, has = one.client, self._let_in().get(one.client)
        if client != (was := self._claimed.get(one.key, client)):
            return f"Expected node {node} to be client {was}, as its key has been, but it says {client}."
        if has is not None:
            return (
                f"Expected one node for each client but got two for {client}: node {has} has it, and node {node} "
                f"says that it is {client}, too. Give each its own `client` in the node config. If it was started "
                "again, it is let in when the one before is no longer connected."
            )
        if self._registered and one.key not in self._claimed and client in self._claimed.values():
            return (
                f"Expected node {node} to have the key that client {client} has had in this run but it has another. "
                "Start it with that key, or name its client otherwise."
            )
        return ""

    def why_not(self, client: str) -> str:
        """Why a client is not among those that are there."""
        return next((one.why for one in self._nodes.values() if one.why and one.client == client), "not connected")


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
    are left are too few, it sends to whoever has come, or come back; and again, after ever longer pauses, to those who
    have not answered in its time, since an answer may be lost, and of whom no answer counts. They end nothing: after
    its time it does without them.

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
        link: GridLink,
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
        self.counted: set[str] = set()  # the clients of whom an answer counts
        self._refused: dict[str, float] = {}  # those who have answered, but none that counts: when each is asked again
        self._lost: dict[str, str] = {}
        self._wanted: Sequence[str] = ()
        self._needed, self._began = 1, 0.0

    @property
    def enough(self) -> bool:
        """Whether so many have answered as can be asked for: those of whom no answer counts are as if not wanted."""
        return len(self.counted) >= max(1, min(self._needed, len(self._wanted) - len(self._refused)))

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
            if self.enough if late else len(self.counted) >= needed and not self._waiting:
                break
            if len(self._refused) == len(wanted) or now - self._began > self._seconds + self._longest:
                break
            if now - asked >= AGAIN_SECONDS:
                asked, nodes = now, self._members.meet()
                # Of an answer that was under way to a node that is gone Flower says so minutes later.
                for message, one in [*self._waiting.items()]:
                    if nodes.get(one.client) != one.node:
                        del self._waiting[message]
                        self._lose(one.client, "its node has gone before it had answered")
                if late or len(self.counted) + len(self._waiting) < needed:
                    self._send({client: nodes[client] for client in wanted if client in nodes})
            time.sleep(_LOOK)
        silent = {one.client: f"no answer within {self._seconds:g} s" for one in self._waiting.values()}
        left = [client for client in wanted if client not in self.counted | self._refused.keys()]
        return {c: silent.get(c) or self._lost.get(c) or self._members.why_not(c) for c in left}

    def _send(self, nodes: Mapping[str, int]) -> None:
        now = time.monotonic()
        waits = Counter(one.client for one in self._waiting.values())  # a slow node works off all that it is sent
        patience = {client: self._seconds * number for client, number in waits.items()}
        asked = self.counted | {one.client for one in self._waiting.values() if now - one.when <= patience[one.client]}
        asked |= {client for client, due in self._refused.items() if due > now}
        clients = {node: client for client, node in nodes.items() if client not in asked}
        if clients:
            parcels = {node: self._parcel(client, node) for node, client in clients.items()}
            sent = self._link.send(parcels, self._seconds + self._longest + 60)
            self._waiting |= {m: Asked(clients[node], node, now, parcels[node].head) for m, node in sent.items()}

    def _listen(self) -> None:
        asked = {**self._waiting}
        for message, answer in self._link.answers(asked) if asked else ():
            client = asked[message].client
            self._waiting.pop(message, None)
            if answer.failed:
                self._lose(client, answer.failed)
            elif self._take(client, answer, asked[message].head):
                self.counted.add(client)
                self._refused.pop(client, None)
            elif client not in self.counted:
                now = time.monotonic()
                self._refused[client] = now + AGAIN_SECONDS + now - self._began

    def _lose(self, client: str, why: str) -> None:
        self._lost[client] = why
        log.info("Client %s is lost: %s", client, why)
