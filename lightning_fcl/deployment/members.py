"""Which client is on which node, and a round's messages: who is sent one, whose answer counts, who is asked again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fcl.deployment.answers import greeting_of
from lightning_fcl.deployment.messages import Parcel
from lightning_fcl.errors import InvalidStateError

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from lightning_fcl.deployment.messages import GridLink

log = logging.getLogger(__name__)

HELLO_SECONDS = 60.0
"""Seconds that a node has to say who it is."""

AGAIN_SECONDS = 3.0
"""Seconds after which a node that was refused, or a client that was lost in a round, is asked again."""

_LOOK = 0.2  # seconds between two looks at who is connected, or for answers

Pack = Callable[[str, int], Parcel]
"""Makes what a client on a node gets."""

Take = Callable[[str, "RecordDict", Mapping[str, Any]], bool]
"""Takes in a client's answer to a head, and says whether it counts."""


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


@dataclass
class Turn:
    """How a client stands in a round."""

    waiting: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Its messages that have no answer yet: to which node each went, and its head."""

    due: float = -math.inf  # when it may be sent one again
    counted: bool = False  # whether one of its answers counts
    refused: bool = False  # whether it has answered, and no answer counts
    lost: str = ""  # why there was no answer to a message


class Members:
    """Which client is on which node, and how each stands in the round at hand.

    A node is asked who it is until it is let in, and its client for an answer in the round until one counts.

    Args:
        link: The way to the nodes.
        recipe: The recipe's fingerprint.
        seconds: A round waits so long for all of its clients,
        longest: and then until there are enough, but no longer than this, and as long for them to be there at first.
        claimed: Whose each key has been, by its name: it stays that client's.
        registered: Whether all keys are registered with the SuperLink: a client's name then stays its key's as well.
    """

    def __init__(
        self,
        link: GridLink,
        recipe: str,
        seconds: float,
        longest: float,
        claimed: dict[str, str],
        registered: bool = False,
    ) -> None:
        self._link, self._recipe, self._seconds, self._longest = link, recipe, seconds, longest
        self._claimed, self._registered = claimed, registered
        self._hello, self._held = Parcel({}), ""
        self._nodes: dict[int, Seen] = {}
        self._turns: dict[str, Turn] = {}
        self._needed = 1
        self.samples: dict[str, int] = {}  # how many each client says it has

    def begin_round(self, hello: Mapping[str, Any], held: str) -> None:
        """What nodes are asked in this round; all of them where something else never travels."""
        self._hello = Parcel(hello)
        if held != self._held:
            self._held, self._nodes = held, {}

    def reach(self, wanted: Sequence[str], needed: int) -> dict[str, int]:
        """The nodes of clients that are there: as soon as there are enough, all that are."""
        ends, logged = time.monotonic() + self._longest, False
        while True:
            nodes = self.meet()
            found = {client: nodes[client] for client in wanted if client in nodes}
            over = time.monotonic() > ends
            unheard = any(one.message and not one.why for one in self._nodes.values())
            if len(found) >= needed and (over or not unheard):
                return found
            if over:
                reasons = "; ".join(dict.fromkeys(one.why for one in self._nodes.values() if one.why))
                raise InvalidStateError(
                    f"Expected at least {needed} of the clients {', '.join(wanted)} within {self._longest:g} s but "
                    f"got {', '.join(found) or 'none'}{f' ({reasons})' if reasons else ''}.",
                    hint="Start their nodes, or decrease `clients-at-least` in the run's configuration.",
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
                self._welcome(node, f"no answer within {HELLO_SECONDS:g} s")
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

    def _welcome(self, node: int, answer: RecordDict | str) -> None:
        one, greeting = self._nodes[node], greeting_of(answer, self._recipe)
        before, one.message = (one.client, one.why), ""
        one.client = one.client if isinstance(answer, str) else greeting.client
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

    @property
    def counted(self) -> int:
        """The clients of whom an answer counts."""
        return sum(turn.counted for turn in self._turns.values())

    @property
    def enough(self) -> bool:
        """Whether so many have answered as can be asked for: those of whom no answer counts are as if not wanted."""
        return self.counted >= max(1, min(self._needed, sum(not turn.refused for turn in self._turns.values())))

    def gather(self, wanted: Sequence[str], needed: int, parcel: Pack, take: Take) -> dict[str, str]:
        """Send clients their messages, and take in their answers, as they come, until there are enough that count.

        It waits for all that are there when it begins, but no longer than its time once it has enough. Where those that
        are left are too few, it sends to whoever has come, or come back; and again, after ever longer pauses, to those
        who have not answered in its time, since an answer may be lost, and of whom no answer counts. They end nothing:
        after its time it does without them.

        Returns:
            The clients that have not answered, and why.
        """
        nodes = self.reach(wanted, needed)
        self._turns, self._needed = {client: Turn() for client in wanted}, needed
        turns, began = self._turns.values(), time.monotonic()
        self._send(nodes, parcel)
        met = began
        while True:
            self._listen(take, began)
            now = time.monotonic()
            late = now - began > self._seconds
            if self.enough if late else self.counted >= needed and not any(turn.waiting for turn in turns):
                break
            if all(turn.refused for turn in turns) or now - began > self._seconds + self._longest:
                break
            if now - met >= AGAIN_SECONDS:
                met, nodes = now, self.meet()
                for client, turn in self._turns.items():  # of those under way to the gone Flower says so minutes later
                    for message in [name for name, (node, _) in turn.waiting.items() if nodes.get(client) != node]:
                        self._lose(client, message, "its node has gone before it had answered")
                if late or sum(turn.counted or bool(turn.waiting) for turn in turns) < needed:
                    self._send(nodes, parcel)
            time.sleep(_LOOK)
        slow = f"no answer within {self._seconds:g} s"
        left = {client: turn for client, turn in self._turns.items() if not (turn.counted or turn.refused)}
        return {c: slow if turn.waiting else turn.lost or self.why_not(c) for c, turn in left.items()}

    def _send(self, nodes: Mapping[str, int], parcel: Pack) -> None:
        now = time.monotonic()
        due = [c for c, turn in self._turns.items() if c in nodes and not turn.counted and turn.due < now]
        clients = {nodes[client]: client for client in due}
        parcels = {node: parcel(client, node) for node, client in clients.items()}
        sent = self._link.send(parcels, self._seconds + self._longest + 60) if parcels else {}
        for message, node in sent.items():
            turn = self._turns[clients[node]]
            turn.waiting[message] = node, parcels[node].head
            turn.due = now + self._seconds * len(turn.waiting)  # a slow node works off all that it is sent

    def _listen(self, take: Take, began: float) -> None:
        asked = {m: (client, head) for client, turn in self._turns.items() for m, (_, head) in turn.waiting.items()}
        for message, answer in self._link.answers(asked) if asked else ():
            client, head = asked[message]
            turn = self._turns[client]
            if isinstance(answer, str):
                self._lose(client, message, answer)
                continue
            turn.waiting.pop(message, None)
            turn.counted = take(client, answer, head) or turn.counted
            turn.refused = not turn.counted
            if turn.refused:
                now = time.monotonic()
                turn.due = now + AGAIN_SECONDS + now - began

    def _lose(self, client: str, message: str, why: str) -> None:
        turn = self._turns[client]
        turn.waiting.pop(message, None)
        turn.lost, turn.due = why, turn.due if turn.waiting else -math.inf
        log.info("Client %s is lost: %s", client, why)
