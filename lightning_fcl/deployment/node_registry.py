"""Which client is on which node, and a round's messages: who is sent one, whose answer counts, who is asked again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fcl.deployment.messages import Parcel
from lightning_fcl.deployment.upload_validation import parse_join_request
from lightning_fcl.errors import InvalidStateError
from lightning_fcl.validation import format_names

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from lightning_fcl.deployment.messages import GridLink

log = logging.getLogger(__name__)

JOIN_INTERVAL_S = 60.0
"""Seconds that a node has to name its client. Then the server ignores it until it answers, and asks again."""

HELLO_LIFETIME = 600.0
"""Seconds for which such an answer is accepted. On a slow device, imports alone can take more than a minute."""

RETRY_INTERVAL_S = 3.0
"""Seconds after which a node that was refused, or a client that was lost in a round, is asked again."""

REMIND_SECONDS = 60.0
"""Least number of seconds between two warnings that the server waits."""

_REASONS = 5  # reasons in a message about ignored nodes
_LOOK = 0.2  # seconds between two looks at who is connected, or for answers

MakeParcel = Callable[[str, int], Parcel]
"""Makes what a client on a node gets."""

AcceptAnswer = Callable[[str, "RecordDict", Mapping[str, Any]], bool]
"""Takes in a client's answer to a head, and says whether it counts."""


@dataclass
class NodeInfo:
    """What is known of a node that is connected."""

    key: str
    client: str = ""  # that it says it is
    reason: str = ""  # it is not let in
    is_admitted: bool = False
    is_compatible: bool = False  # whether it has what never travels as the server has it
    asked_at: float = -math.inf  # when it was asked last who it is
    messages: list[str] = field(default_factory=list)  # that asked it, and have no answer yet


@dataclass
class ClientTurn:
    """How a client stands in a round."""

    waiting: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Its messages that have no answer yet: to which node each went, and its head."""

    due_at: float = -math.inf  # when it may be sent one again
    is_counted: bool = False  # whether one of its answers counts
    is_rejected: bool = False  # whether it has answered, and no answer counts
    lost_reason: str = ""  # why there was no answer to a message


class NodeRegistry:
    """Which client is on which node, and how each stands in the round at hand.

    A node is asked who it is until it is let in, and its client for an answer in the round until one counts.

    Args:
        link: The way to the nodes.
        recipe: The recipe's fingerprint.
        seconds: A round waits so long for all of its clients,
        longest: and then until there are enough, but no longer than this, and as long for them to be there at first.
        claimed_clients: Whose each key has been, by its name: it stays that client's.
        registered: Whether all keys are registered with the SuperLink: a client's name then stays its key's as well.
    """

    def __init__(
        self,
        link: GridLink,
        recipe: str,
        seconds: float,
        longest: float,
        claimed_clients: dict[str, str],
        registered: bool = False,
    ) -> None:
        self._link, self._recipe, self._seconds, self._longest = link, recipe, seconds, longest
        self._claimed, self._registered = claimed_clients, registered
        self._hello, self._held = Parcel({}), ""
        self._nodes: dict[int, NodeInfo] = {}
        self._turns: dict[str, ClientTurn] = {}
        self._needed, self._reminded = 1, -math.inf
        self._clients: Collection[str] = ()
        self.samples: dict[str, int] = {}  # how many each client says it has

    def start_round(self, hello: Mapping[str, Any], state_digest: str, clients: Collection[str]) -> None:
        """Set the question that nodes are asked in this round, the state that they should hold, and the run's clients.

        If the state is another one than before, all nodes are asked again.
        """
        self._hello, self._clients = Parcel(hello), clients
        if state_digest != self._held:
            self._held, self._nodes = state_digest, {}

    def wait_for_nodes(self, clients: Sequence[str], min_clients: int) -> dict[str, int]:
        """Wait until enough clients are there, and return the node of each client that is.

        Raises:
            InvalidStateError: If there are too few clients after `join-timeout`.
        """
        began = time.monotonic()
        while True:
            nodes = self.refresh_nodes()
            node_by_client = {client: nodes[client] for client in clients if client in nodes}
            if len(node_by_client) >= min_clients:
                return node_by_client
            if time.monotonic() - began > self._longest:
                raise InvalidStateError(
                    f"Expected at least {min_clients} of the clients {format_names(clients)} to join within "
                    f"{self._longest:g} s "
                    f"but {format_names(node_by_client) or 'none'} joined.{self._ignored()}",
                    hint="Start their nodes, or decrease `min-clients` in the run's configuration.",
                )
            if self._should_remind(began + RETRY_INTERVAL_S):
                missing, num_missing = (
                    format_names(client for client in clients if client not in node_by_client),
                    min_clients - len(node_by_client),
                )
                log.warning("Waiting for %d more clients to join, of %s.%s", num_missing, missing, self._ignored())
            time.sleep(_LOOK)

    def _should_remind(self, earliest_time: float) -> bool:
        """Return whether a warning about waiting is due: not before a time, and at most once in `REMIND_SECONDS`."""
        current_time = time.monotonic()
        due = current_time >= max(earliest_time, self._reminded + REMIND_SECONDS)
        self._reminded = current_time if due else self._reminded
        return due

    def _ignored(self) -> str:
        """Return a text about the connected nodes that are not let in, and the setting that lets them in."""
        ignored = [one for one in self._nodes.values() if one.reason]
        reasons = list(dict.fromkeys(one.reason for one in ignored))
        text = f" Ignored {len(ignored)} connected nodes. {' '.join(reasons[:_REASONS])}" if ignored else ""
        if strange := sorted({one.client for one in ignored if one.client} - {*self._clients}):
            names = ",".join(strange)
            text += f' To train these clients, set `data` and clients="{names}" of the run\'s configuration.'
        return text

    def refresh_nodes(self) -> dict[str, int]:
        """The clients that are there now, and their nodes; those that are new, or were refused, are asked."""
        current_time = time.monotonic()
        previous_nodes = self._nodes
        self._nodes = {node: previous_nodes.get(node) or NodeInfo(key) for node, key in self._link.nodes().items()}
        for node in previous_nodes.keys() - self._nodes.keys():
            log.info("Node %d (client %s) disconnected.", node, previous_nodes[node].client or "unknown")
        node_by_message = {message: node for node, one in self._nodes.items() for message in one.messages}
        for message, answer in [*self._link.answers(node_by_message)] if node_by_message else ():
            info = self._nodes[node_by_message[message]]
            if message in info.messages:
                info.messages = [other for other in info.messages if other != message and isinstance(answer, str)]
                if not info.messages:
                    self._welcome(node_by_message[message], answer)
        overdue = [
            node for node, one in self._nodes.items() if one.messages and current_time - one.asked_at > JOIN_INTERVAL_S
        ]
        for node in overdue:
            self._welcome(
                node,
                f"Expected an answer of node {node} within {JOIN_INTERVAL_S:g} s but got none. If it was started "
                "with `--isolation process`, start `lightning-fcl deploy executor` beside it.",
            )
        strange = [node for node, one in sorted(self._nodes.items()) if not (one.is_admitted or one.messages)]
        due = [node for node in strange if current_time - self._nodes[node].asked_at >= RETRY_INTERVAL_S] + overdue
        for node in due:
            self._nodes[node].asked_at = current_time
        for message, node in (self._link.send(dict.fromkeys(due, self._hello), HELLO_LIFETIME) if due else {}).items():
            self._nodes[node].messages.append(message)
        return self._let_in()

    def _let_in(self) -> dict[str, int]:
        return {one.client: node for node, one in self._nodes.items() if one.is_admitted}

    @property
    def compatible_nodes(self) -> set[int]:
        """The nodes that have what never travels as the server has it."""
        return {node for node, one in self._nodes.items() if one.is_compatible}

    @property
    def duplicate_claims(self) -> dict[str, list[str]]:
        """Of clients that several nodes say they are, these: first who is let in."""
        nodes_by_client = {client: [node] for client, node in self._let_in().items()}
        for node, info in self._nodes.items():
            if not info.is_admitted and info.client in nodes_by_client:
                nodes_by_client[info.client].append(node)
        return {client: [*map(str, nodes)] for client, nodes in nodes_by_client.items() if len(nodes) > 1}

    def _welcome(self, node: int, answer: RecordDict | str) -> None:
        info, greeting = self._nodes[node], parse_join_request(answer, self._recipe)
        previous_status = info.client, info.reason
        info.client = info.client if isinstance(answer, str) else greeting.client
        info.reason = greeting.error or self._fault(node, info)
        if info.reason:
            if (info.client, info.reason) != previous_status:
                log.warning("Ignored node %d (client %s): %s", node, info.client or "unknown", info.reason)
            return
        info.is_admitted, info.is_compatible = True, greeting.client_round_counts == self._held
        self._claimed[info.key] = info.client
        self.samples[info.client] = greeting.samples
        log.info("Client %s joined on node %d with %d samples.", info.client, node, greeting.samples)

    def _fault(self, node: int, info: NodeInfo) -> str:
        """Why a node may not be the client that it says it is; "": it may."""
        client, has = info.client, self._let_in().get(info.client)
        if client not in self._clients:
            return (
                f"Expected node {node} to be one of the clients {format_names(self._clients)} of the run but it is "
                f"{client}. "
                "Correct `client` of its node config, or set `data` and `clients` of the run's configuration."
            )
        if client != (was := self._claimed.get(info.key, client)):
            return f"Expected node {node} to be client {was}, as its key has been, but it says {client}."
        if has is not None:
            return (
                f"Expected one node for each client but got two for {client}: node {has} has it, and node {node} "
                f"says that it is {client}, too. Give each its own `client` in the node config. If it was started "
                "again, it is let in when the one before is no longer connected."
            )
        if self._registered and info.key not in self._claimed and client in self._claimed.values():
            return (
                f"Expected node {node} to have the key that client {client} has had in this run but it has another. "
                "Start it with that key, or name its client otherwise."
            )
        return ""

    def rejection_reason(self, client: str) -> str:
        """Why a client is not among those that are there."""
        return next(
            (one.reason for one in self._nodes.values() if one.reason and one.client == client), "not connected"
        )

    @property
    def num_accepted_answers(self) -> int:
        """The clients of whom an answer counts."""
        return sum(turn.is_counted for turn in self._turns.values())

    @property
    def has_enough_answers(self) -> bool:
        """Whether so many have answered as can be asked for: those of whom no answer counts are as if not wanted."""
        return self.num_accepted_answers >= max(
            1, min(self._needed, sum(not turn.is_rejected for turn in self._turns.values()))
        )

    def collect_answers(
        self, clients: Sequence[str], min_clients: int, parcel: MakeParcel, take: AcceptAnswer
    ) -> dict[str, str]:
        """Send clients their messages, and take their answers, until enough answers count.

        The round begins when enough clients are there. It waits for all nodes that are connected then, also for those
        that have not yet answered who they are, but at most `round-timeout` once it has enough answers. If too few
        clients are left, the round is sent to clients that join or come back, and again to clients that have not
        answered within `round-timeout` or of which no answer counts, after longer and longer pauses. After
        `round-timeout`, clients of which no answer counts are no longer needed. After `join-timeout` more, the round
        ends with the answers that it has.

        Returns:
            The clients that have not answered, and why.
        """
        nodes = self.wait_for_nodes(clients, min_clients)
        self._turns, self._needed = {client: ClientTurn() for client in clients}, min_clients
        turns, began = self._turns.values(), time.monotonic()
        unknown = self._unheard if len(nodes) < len(clients) else set[int]()
        self._send(nodes, parcel)
        refresh_time = began
        while True:
            self._listen(take, began)
            current_time = time.monotonic()
            late = current_time - began > self._seconds
            is_waiting = bool(unknown) or any(turn.waiting for turn in turns)
            if self.has_enough_answers if late else self.num_accepted_answers >= min_clients and not is_waiting:
                break
            if current_time - began > self._seconds + self._longest:
                break
            if unknown or current_time - refresh_time >= RETRY_INTERVAL_S:
                refresh_time, nodes = current_time, self.refresh_nodes()
                for client, turn in self._turns.items():  # of those under way to the gone Flower says so minutes later
                    for message in [name for name, (node, _) in turn.waiting.items() if nodes.get(client) != node]:
                        self._lose(client, message, "its node has gone before it had answered")
                should_resend = late or sum(turn.is_counted or bool(turn.waiting) for turn in turns) < min_clients
                self._send(
                    nodes if should_resend else {c: node for c, node in nodes.items() if node in unknown}, parcel
                )
                unknown = unknown & self._unheard
            if self._should_remind(began + REMIND_SECONDS):
                names = format_names(
                    (client for client, turn in self._turns.items() if not turn.is_counted), max_names=5
                )
                number = self.num_accepted_answers
                log.warning(
                    "Waiting for uploads of the clients %s. The round has %d of %d.", names, number, min_clients
                )
            time.sleep(_LOOK)
        slow = f"no answer within {self._seconds:g} s"
        remaining_turns = {
            client: turn for client, turn in self._turns.items() if not (turn.is_counted or turn.is_rejected)
        }
        return {
            c: slow if turn.waiting else turn.lost_reason or self.rejection_reason(c)
            for c, turn in remaining_turns.items()
        }

    @property
    def _unheard(self) -> set[int]:
        """Nodes that have not answered yet who they are, nor failed to answer before."""
        return {node for node, one in self._nodes.items() if one.messages and not one.reason}

    def _send(self, nodes: Mapping[str, int], parcel: MakeParcel) -> None:
        current_time = time.monotonic()
        due = [
            c for c, turn in self._turns.items() if c in nodes and not turn.is_counted and turn.due_at < current_time
        ]
        clients = {nodes[client]: client for client in due}
        parcels = {node: parcel(client, node) for node, client in clients.items()}
        node_by_message = self._link.send(parcels, self._seconds + self._longest + 60) if parcels else {}
        for message, node in node_by_message.items():
            turn = self._turns[clients[node]]
            turn.waiting[message] = node, parcels[node].header
            turn.due_at = current_time + self._seconds * len(turn.waiting)  # a slow node works off all that it is sent

    def _listen(self, take: AcceptAnswer, began: float) -> None:
        pending_messages = {
            m: (client, head) for client, turn in self._turns.items() for m, (_, head) in turn.waiting.items()
        }
        for message, answer in self._link.answers(pending_messages) if pending_messages else ():
            client, head = pending_messages[message]
            turn = self._turns[client]
            if isinstance(answer, str):
                self._lose(client, message, answer)
                continue
            turn.waiting.pop(message, None)
            turn.is_counted = take(client, answer, head) or turn.is_counted
            turn.is_rejected = not turn.is_counted
            if turn.is_rejected:
                current_time = time.monotonic()
                turn.due_at = current_time + RETRY_INTERVAL_S + current_time - began

    def _lose(self, client: str, message: str, reason: str) -> None:
        turn = self._turns[client]
        turn.waiting.pop(message, None)
        turn.lost_reason, turn.due_at = reason, turn.due_at if turn.waiting else -math.inf
        log.info("Client %s is lost: %s", client, reason)
