"""Which client is on which node, and a round's messages: who is sent one, whose answer counts, who is asked again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fcl.deployment.answers import greeting_of
from lightning_fcl.deployment.messages import Parcel
from lightning_fcl.errors import InvalidStateError, listed

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from lightning_fcl.deployment.messages import GridLink

log = logging.getLogger(__name__)

HELLO_SECONDS = 60.0
"""Seconds that a node has to name its client. Then the server ignores it until it answers, and asks again."""

HELLO_LIFETIME = 600.0
"""Seconds for which such an answer is accepted. On a slow device, imports alone can take more than a minute."""

AGAIN_SECONDS = 3.0
"""Seconds after which a node that was refused, or a client that was lost in a round, is asked again."""

REMIND_SECONDS = 60.0
"""Least number of seconds between two warnings that the server waits."""

_REASONS = 5  # reasons in a message about ignored nodes
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
    messages: list[str] = field(default_factory=list)  # that asked it, and have no answer yet


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
        self._needed, self._reminded = 1, -math.inf
        self._clients: Collection[str] = ()
        self.samples: dict[str, int] = {}  # how many each client says it has

    def begin_round(self, hello: Mapping[str, Any], held: str, clients: Collection[str]) -> None:
        """Set the question that nodes are asked in this round, the state that they should hold, and the run's clients.

        If the state is another one than before, all nodes are asked again.
        """
        self._hello, self._clients = Parcel(hello), clients
        if held != self._held:
            self._held, self._nodes = held, {}

    def reach(self, wanted: Sequence[str], needed: int) -> dict[str, int]:
        """Wait until enough clients are there, and return the node of each client that is.

        Raises:
            InvalidStateError: If there are too few clients after `join-seconds`.
        """
        began = time.monotonic()
        while True:
            nodes = self.meet()
            found = {client: nodes[client] for client in wanted if client in nodes}
            if len(found) >= needed:
                return found
            if time.monotonic() - began > self._longest:
                raise InvalidStateError(
                    f"Expected at least {needed} of the clients {listed(wanted)} to join within {self._longest:g} s "
                    f"but {listed(found) or 'none'} joined.{self._ignored()}",
                    hint="Start their nodes, or decrease `clients-at-least` in the run's configuration.",
                )
            if self._should_remind(began + AGAIN_SECONDS):
                missing, more = listed(client for client in wanted if client not in found), needed - len(found)
                log.warning("Waiting for %d more clients to join, of %s.%s", more, missing, self._ignored())
            time.sleep(_LOOK)

    def _should_remind(self, since: float) -> bool:
        """Return whether a warning about waiting is due: not before a time, and at most once in `REMIND_SECONDS`."""
        now = time.monotonic()
        due = now >= max(since, self._reminded + REMIND_SECONDS)
        self._reminded = now if due else self._reminded
        return due

    def _ignored(self) -> str:
        """Return a text about the connected nodes that are not let in, and the setting that lets them in."""
        ignored = [one for one in self._nodes.values() if one.why]
        reasons = list(dict.fromkeys(one.why for one in ignored))
        text = f" Ignored {len(ignored)} connected nodes. {' '.join(reasons[:_REASONS])}" if ignored else ""
        if strange := sorted({one.client for one in ignored if one.client} - {*self._clients}):
            names = ",".join(strange)
            text += f' To train these clients, set `data` and clients="{names}" of the run\'s configuration.'
        return text

    def meet(self) -> dict[str, int]:
        """The clients that are there now, and their nodes; those that are new, or were refused, are asked."""
        now = time.monotonic()
        before = self._nodes
        self._nodes = {node: before.get(node) or Seen(key) for node, key in self._link.nodes().items()}
        for node in before.keys() - self._nodes.keys():
            log.info("Node %d (client %s) disconnected.", node, before[node].client or "unknown")
        waiting = {message: node for node, one in self._nodes.items() for message in one.messages}
        for message, answer in [*self._link.answers(waiting)] if waiting else ():
            one = self._nodes[waiting[message]]
            if message in one.messages:
                one.messages = [other for other in one.messages if other != message and isinstance(answer, str)]
                if not one.messages:
                    self._welcome(waiting[message], answer)
        overdue = [node for node, one in self._nodes.items() if one.messages and now - one.asked > HELLO_SECONDS]
        for node in overdue:
            self._welcome(
                node,
                f"Expected an answer of node {node} within {HELLO_SECONDS:g} s but got none. If it was started "
                "with `--isolation process`, start `lightning-fcl deploy executor` beside it.",
            )
        strange = [node for node, one in sorted(self._nodes.items()) if not (one.let_in or one.messages)]
        due = [node for node in strange if now - self._nodes[node].asked >= AGAIN_SECONDS] + overdue
        for node in due:
            self._nodes[node].asked = now
        for message, node in (self._link.send(dict.fromkeys(due, self._hello), HELLO_LIFETIME) if due else {}).items():
            self._nodes[node].messages.append(message)
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
        before = one.client, one.why
        one.client = one.client if isinstance(answer, str) else greeting.client
        one.why = greeting.fault or self._fault(node, one)
        if one.why:
            if (one.client, one.why) != before:
                log.warning("Ignored node %d (client %s): %s", node, one.client or "unknown", one.why)
            return
        one.let_in, one.alike = True, greeting.held == self._held
        self._claimed[one.key] = one.client
        self.samples[one.client] = greeting.samples
        log.info("Client %s joined on node %d with %d samples.", one.client, node, greeting.samples)

    def _fault(self, node: int, one: Seen) -> str:
        """Why a node may not be the client that it says it is; "": it may."""
        client, has = one.client, self._let_in().get(one.client)
        if client not in self._clients:
            return (
                f"Expected node {node} to be one of the clients {listed(self._clients)} of the run but it is {client}. "
                "Correct `client` of its node config, or set `data` and `clients` of the run's configuration."
            )
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
        """Send clients their messages, and take their answers, until enough answers count.

        The round begins when enough clients are there. It waits for all nodes that are connected then, also for those
        that have not yet answered who they are, but at most `round-seconds` once it has enough answers. If too few
        clients are left, the round is sent to clients that join or come back, and again to clients that have not
        answered within `round-seconds` or of which no answer counts, after longer and longer pauses. After
        `round-seconds`, clients of which no answer counts are no longer needed. After `join-seconds` more, the round
        ends with the answers that it has.

        Returns:
            The clients that have not answered, and why.
        """
        nodes = self.reach(wanted, needed)
        self._turns, self._needed = {client: Turn() for client in wanted}, needed
        turns, began = self._turns.values(), time.monotonic()
        unknown = self._unheard if len(nodes) < len(wanted) else set[int]()
        self._send(nodes, parcel)
        met = began
        while True:
            self._listen(take, began)
            now = time.monotonic()
            late = now - began > self._seconds
            is_waiting = bool(unknown) or any(turn.waiting for turn in turns)
            if self.enough if late else self.counted >= needed and not is_waiting:
                break
            if now - began > self._seconds + self._longest:
                break
            if unknown or now - met >= AGAIN_SECONDS:
                met, nodes = now, self.meet()
                for client, turn in self._turns.items():  # of those under way to the gone Flower says so minutes later
                    for message in [name for name, (node, _) in turn.waiting.items() if nodes.get(client) != node]:
                        self._lose(client, message, "its node has gone before it had answered")
                few = late or sum(turn.counted or bool(turn.waiting) for turn in turns) < needed
                self._send(nodes if few else {c: node for c, node in nodes.items() if node in unknown}, parcel)
                unknown = unknown & self._unheard
            if self._should_remind(began + REMIND_SECONDS):
                names = listed((client for client, turn in self._turns.items() if not turn.counted), most=5)
                number = self.counted
                log.warning("Waiting for uploads of the clients %s. The round has %d of %d.", names, number, needed)
            time.sleep(_LOOK)
        slow = f"no answer within {self._seconds:g} s"
        left = {client: turn for client, turn in self._turns.items() if not (turn.counted or turn.refused)}
        return {c: slow if turn.waiting else turn.lost or self.why_not(c) for c, turn in left.items()}

    @property
    def _unheard(self) -> set[int]:
        """Nodes that have not answered yet who they are, nor failed to answer before."""
        return {node for node, one in self._nodes.items() if one.messages and not one.why}

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
