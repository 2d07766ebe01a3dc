"""Registry of the nodes: the client of each node, and the messages and answers of a round."""

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
"""Seconds within which a new node must name its client. After this time, the server ignores the node and asks again."""

HELLO_LIFETIME = 600.0
"""Seconds for which the server accepts a late answer of a node. On a slow device, imports can take over a minute."""

RETRY_INTERVAL_S = 3.0
"""Minimum seconds before the server asks an ignored node again, or sends a message again after a rejected answer."""

REMIND_SECONDS = 60.0
"""Minimum number of seconds between two warnings that the server is waiting."""

# Maximum number of reasons in a message about ignored nodes.
_REASONS = 5
# Seconds between two requests for connected nodes or for answers.
_LOOK = 0.2

MakeParcel = Callable[[str, int], Parcel]
"""Function that returns the message for a client on a node."""

AcceptAnswer = Callable[[str, "RecordDict", Mapping[str, Any]], bool]
"""Function that processes a client's answer, and returns whether the answer is accepted.

Arguments: the client, the answer, and the header of the message that the client answers.
"""


@dataclass
class NodeInfo:
    """State of a connected node.

    Attributes:
        key: Hash of the node's public key.
        client: Client that the node claims to be. Empty before the first answer.
        reason: Reason why the server ignores the node. Empty if the node is not ignored.
        is_admitted: Whether the server trains the client on this node.
        is_compatible: Whether the node has the same initial values as the server for tensors that are not transferred.
        asked_at: Time when the server last asked the node which client it trains.
        messages: Names of the messages that asked the node which client it trains, and that have no answer yet.
    """

    key: str
    client: str = ""
    reason: str = ""
    is_admitted: bool = False
    is_compatible: bool = False
    asked_at: float = -math.inf
    messages: list[str] = field(default_factory=list)


@dataclass
class ClientTurn:
    """State of a client in the current round.

    Attributes:
        waiting: Messages without an answer, by name. Each value is the node that got the message, and the header.
        due_at: Time from which the server may send the next message.
        is_counted: Whether the server has accepted an answer.
        is_rejected: Whether the server has got answers, but has accepted none.
        lost_reason: Reason why a message got no answer.
    """

    waiting: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    due_at: float = -math.inf
    is_counted: bool = False
    is_rejected: bool = False
    lost_reason: str = ""


class NodeRegistry:
    """The nodes of a deployment, their clients, and the state of each client in the current round.

    The server asks each node which client it trains, until the node is admitted. In a round, the server sends messages
    to a client until the server has accepted an answer.

    Args:
        link: Connection to the nodes.
        recipe: Fingerprint of the recipe.
        seconds: Seconds for which a round waits for all of its clients.
        longest: Additional seconds for which a round waits for enough answers. Also the seconds that a round waits for
            enough clients to join.
        claimed_clients: Client of each key, by the hash of the key. A key always belongs to its first client.
        registered: Whether the SuperLink only admits registered keys. If True, a client always belongs to its first
            key.
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
        # Number of samples that each client has reported.
        self.samples: dict[str, int] = {}

    def start_round(self, hello: Mapping[str, Any], state_digest: str, clients: Collection[str]) -> None:
        """Prepare a round. If ``state_digest`` has changed, the server asks all nodes for their clients again.

        Args:
            hello: Header of the message that asks a node which client it trains.
            state_digest: Digest of the tensors that are not transferred.
            clients: Names of the clients of the run.
        """
        self._hello, self._clients = Parcel(hello), clients
        if state_digest != self._held:
            self._held, self._nodes = state_digest, {}

    def wait_for_nodes(self, clients: Sequence[str], min_clients: int) -> dict[str, int]:
        """Wait until enough clients have joined. Return the node of each client that has joined.

        Raises:
            InvalidStateError: If too few clients have joined after ``longest`` seconds.
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
                    f"{self._longest:g} s, but {format_names(node_by_client) or 'none'} joined.{self._ignored()}",
                    hint="Start the nodes of the missing clients, or decrease `min-clients` in the run configuration.",
                )
            if self._should_remind(began + RETRY_INTERVAL_S):
                missing, num_missing = (
                    format_names(client for client in clients if client not in node_by_client),
                    min_clients - len(node_by_client),
                )
                log.warning("Waiting for %d more of the clients %s to join.%s", num_missing, missing, self._ignored())
            time.sleep(_LOOK)

    def _should_remind(self, earliest_time: float) -> bool:
        """Return whether a warning about waiting is due: after a given time, and at most once in `REMIND_SECONDS`."""
        current_time = time.monotonic()
        due = current_time >= max(earliest_time, self._reminded + REMIND_SECONDS)
        self._reminded = current_time if due else self._reminded
        return due

    def _ignored(self) -> str:
        """Return a text about the connected nodes that the server ignores, and the setting that admits them."""
        ignored = [one for one in self._nodes.values() if one.reason]
        reasons = list(dict.fromkeys(one.reason for one in ignored))
        ending = "" if len(ignored) == 1 else "s"
        text = f" Ignored {len(ignored)} connected node{ending}. {' '.join(reasons[:_REASONS])}" if ignored else ""
        if strange := sorted({one.client for one in ignored if one.client} - {*self._clients}):
            names = ",".join(strange)
            text += f' To train the clients of these nodes, set `data` and clients="{names}" in the run configuration.'
        return text

    def refresh_nodes(self) -> dict[str, int]:
        """Update the connected nodes from their answers. Ask new and ignored nodes which clients they train.

        Returns:
            The node of each admitted client.
        """
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
                f"Expected an answer from node {node} within {JOIN_INTERVAL_S:g} s, but got none. If the SuperNode was "
                "started with `--isolation process`, start `lightning-fcl deploy executor` for it.",
            )
        strange = [node for node, one in sorted(self._nodes.items()) if not (one.is_admitted or one.messages)]
        due = [node for node in strange if current_time - self._nodes[node].asked_at >= RETRY_INTERVAL_S] + overdue
        for node in due:
            self._nodes[node].asked_at = current_time
        for message, node in (self._link.send(dict.fromkeys(due, self._hello), HELLO_LIFETIME) if due else {}).items():
            self._nodes[node].messages.append(message)
        return self._let_in()

    def _let_in(self) -> dict[str, int]:
        """Return the node of each admitted client."""
        return {one.client: node for node, one in self._nodes.items() if one.is_admitted}

    @property
    def compatible_nodes(self) -> set[int]:
        """Numbers of the nodes that have the server's initial values of tensors that are not transferred."""
        return {node for node, one in self._nodes.items() if one.is_compatible}

    @property
    def duplicate_claims(self) -> dict[str, list[str]]:
        """Node numbers of each admitted client that several nodes claim to be. The admitted node is the first."""
        nodes_by_client = {client: [node] for client, node in self._let_in().items()}
        for node, info in self._nodes.items():
            if not info.is_admitted and info.client in nodes_by_client:
                nodes_by_client[info.client].append(node)
        return {client: [*map(str, nodes)] for client, nodes in nodes_by_client.items() if len(nodes) > 1}

    def _welcome(self, node: int, answer: RecordDict | str) -> None:
        """Admit a node if its answer is valid. Otherwise, ignore the node and log the reason."""
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
        log.info("Client %s joined on node %d. Number of training samples: %d.", info.client, node, greeting.samples)

    def _fault(self, node: int, info: NodeInfo) -> str:
        """Return the reason why a node cannot be the client that it claims to be, or an empty text."""
        client, has = info.client, self._let_in().get(info.client)
        if client not in self._clients:
            return (
                f"Expected node {node} to be one of the clients {format_names(self._clients)} of the run, but it is "
                f"{client}. Correct `client` in its node config, or set `data` and `clients` in the run configuration."
            )
        if client != (was := self._claimed.get(info.key, client)):
            return (
                f"Expected node {node} to be client {was}, because its key belongs to this client, but the node claims "
                f"to be {client}."
            )
        if has is not None:
            return (
                f"Expected one node for each client, but got two for {client}: node {has} is admitted, and node {node} "
                f"also claims to be {client}. Give each node a different `client` in its node config. If the SuperNode "
                "was started again, it is admitted when its previous node is no longer connected."
            )
        if self._registered and info.key not in self._claimed and client in self._claimed.values():
            return (
                f"Expected node {node} to have the first key of client {client} in this run, but its key is different. "
                "Start the node with the first key, or give its client another name."
            )
        return ""

    def rejection_reason(self, client: str) -> str:
        """Return the reason why a client has no admitted node."""
        return next(
            (one.reason for one in self._nodes.values() if one.reason and one.client == client), "not connected"
        )

    @property
    def num_accepted_answers(self) -> int:
        """Number of clients with an accepted answer."""
        return sum(turn.is_counted for turn in self._turns.values())

    @property
    def has_enough_answers(self) -> bool:
        """Whether the round has enough accepted answers, at least 1.

        Clients with only rejected answers decrease the required number of answers, if too few other clients remain.
        """
        return self.num_accepted_answers >= max(
            1, min(self._needed, sum(not turn.is_rejected for turn in self._turns.values()))
        )

    def collect_answers(
        self, clients: Sequence[str], min_clients: int, parcel: MakeParcel, take: AcceptAnswer
    ) -> dict[str, str]:
        """Send messages to clients and process their answers until enough answers are accepted.

        The round begins when ``min_clients`` of the clients have joined. It waits for the clients whose nodes are
        connected at this time. If a client has not joined yet, the round also waits for connected nodes that have not
        named their client yet. When the round has enough answers, the waiting time is at most ``round_timeout`` in
        total.

        If too few clients remain, clients that join or reconnect also get the message. Clients whose answer is
        missing after ``round_timeout``, or was rejected, get the message again after increasing pauses.

        After ``round_timeout``, the round no longer needs clients with only rejected answers. After ``join_timeout``
        more seconds, the round ends with the answers that it has.

        Args:
            clients: Names of the sampled clients.
            min_clients: Number of answers that the round needs.
            parcel: Function that returns the message for a client on a node.
            take: Function that processes an answer, and returns whether the answer is accepted.

        Returns:
            For each client without any answer, the reason why there is no answer.
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
                # For a message to a disconnected node, Flower reports an error only minutes later.
                for client, turn in self._turns.items():
                    for message in [name for name, (node, _) in turn.waiting.items() if nodes.get(client) != node]:
                        self._lose(client, message, "its node disconnected before it answered")
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
                    "Waiting for answers of these clients: %s. Accepted answers: %d. Required answers: %d.",
                    names,
                    number,
                    min_clients,
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
        """Nodes that have not named their client yet, and that the server does not ignore."""
        return {node for node, one in self._nodes.items() if one.messages and not one.reason}

    def _send(self, nodes: Mapping[str, int], parcel: MakeParcel) -> None:
        """Send the round's message to each client that has a node and no accepted answer, and whose pause is over."""
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
            # The pauses grow, because a slow node processes all its messages in sequence.
            turn.due_at = current_time + self._seconds * len(turn.waiting)

    def _listen(self, take: AcceptAnswer, began: float) -> None:
        """Process the answers that have arrived."""
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
        """Remove a message that cannot be answered any more, so that the client can get the next message."""
        turn = self._turns[client]
        turn.waiting.pop(message, None)
        turn.lost_reason, turn.due_at = reason, turn.due_at if turn.waiting else -math.inf
        log.info("Client %s did not answer a message of the round: %s", client, reason)
