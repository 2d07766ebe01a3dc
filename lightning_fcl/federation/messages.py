"""The messages of a round: what clients download and upload, and what stays with them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import listed, quoted
from lightning_fcl.federation.aggregation import Aggregator
from lightning_fcl.federation.client_store import ClientState, ClientStore, Memory
from lightning_fcl.federation.compression import Compression, transmit
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.reductions import Reduction, State

log = logging.getLogger(__name__)

_UNSENT = "unsent"  # the section of what a client could not send
_RESIDUAL = "residual"  # and of what compression has left over

DIVERGED = "Lower the learning rate, or a method's strength, or clip gradients (`gradient_clip_val` of the Trainer)."
"""What to do about numbers that are not finite."""


@dataclass
class RoundRecord:
    """What happened in one round: bytes per client on the wire, and who did not make it.

    Args:
        trained: Clients whose upload was taken.
        upload_bytes: Bytes that each client sent.
        download_bytes: Bytes that each client received.
        dropped: Clients whose upload was refused, and why.
        skipped: Clients that were chosen but had no data.
        missed: Clients that trained but missed the synchronisation.
        diverged: Clients whose loss was not finite in some step, though all that they sent is.
        master: In a swarm, the client that brought the uploads together.
        late: In a rehearsed deployment, clients whose uploads came too late, and were not trained for it.
        staleness: There, how many rounds ago clients had downloaded, where any.
        simulated_seconds: There, how long the round took; None: nobody has looked at a clock.
    """

    trained: list[str] = field(default_factory=list)
    upload_bytes: dict[str, int] = field(default_factory=dict)
    download_bytes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    master: str | None = None
    late: list[str] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    simulated_seconds: float | None = None

    def upload(self, client: str, number: int) -> None:
        """Count bytes that a client sends: its state, or what a method sends beside it."""
        self.upload_bytes[client] = self.upload_bytes.get(client, 0) + number

    def download(self, client: str, number: int) -> None:
        """Count bytes that a client receives."""
        self.download_bytes[client] = self.download_bytes.get(client, 0) + number

    def combine(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Take in what happened to the other ranks' clients.

        Args:
            ranks: The ranks.
            order: Where a client stands in the round's order; those that stand together keep theirs.
        """
        parts = [vars(record) for record in ranks.share(self)]
        for name, value in vars(self).items():
            if isinstance(value, dict):
                found = [item for part in parts for item in part[name].items()]
                value.clear()
                value.update(sorted(found, key=lambda item: order.get(item[0], -1)))
            elif isinstance(value, list):
                value[:] = sorted((client for part in parts for client in part[name]), key=lambda c: order.get(c, -1))


def own_entries(kept: ClientState, device: torch.device) -> State:
    """What a client goes on from in place of the server's: its own entries, and what it could not send.

    Example:
        >>> own_entries({"model": {"head": torch.ones(1)}}, torch.device("cpu"))
        {'head': tensor([1.])}
    """
    return {name: value.to(device) for part in ("model", _UNSENT) for name, value in kept.get(part, {}).items()}


class Messages:
    """The messages of one round between the server and its clients, each counted in bytes.

    Args:
        store: Keeps the clients' states.
        state: The server's state at the start of the round.
        reductions: The reduction of each of its entries.
        weights: Tells the clients' weights in means.
        numbers: Tells the clients' numbers, by which uploads are put in order.
        compression: Code of the uploads of ``learnt`` entries whose reduction is ``mean``.
        learnt: The trainable parameters that clients send.
        frozen: The others: they travel for a client whose training changes them all the same.
        everywhere: Those of the frozen that every device has as they are, from the model that was published.
    """

    def __init__(
        self,
        store: ClientStore,
        state: State,
        reductions: Mapping[str, Reduction],
        weights: Callable[[ClientRounds], Sequence[float]],
        numbers: Callable[[Sequence[str]], Sequence[int]],
        compression: Compression | None,
        learnt: Sequence[str],
        frozen: Collection[str] = (),
        everywhere: Collection[str] = (),
    ) -> None:
        self.record = RoundRecord()
        self.aggregator = Aggregator(reductions)
        self._store = store
        self._reductions = reductions
        self._weights = weights
        self._numbers = numbers
        self._compression = compression
        self._learnt = learnt
        self._frozen = frozen
        self._everywhere = everywhere
        self.changed: set[str] = set()  # of the frozen, by some client
        self._residuals: dict[str, Memory] = {}  # of this round's uploads, until they are kept
        self.offer(state)

    def offer(self, state: State) -> None:
        """Let clients download this state from now on."""
        self._state = state
        self._start = {name: self._reductions[name].start(value) for name, value in state.items()}
        down = {name: value for name, value in state.items() if self._reductions[name].down}
        sent = {name: value for name, value in down.items() if name not in self._everywhere}
        self._download_bytes = sum(self._reductions[name].wire_bytes(value) for name, value in sent.items())
        self._all_travel = len(down) == len(state) and all(self._start[name] is down[name] for name in down)

    def download(self, clients: Sequence[str]) -> tuple[list[State], list[ClientState]]:
        """The state that each client starts the round from, and all that it has kept."""
        kept = [self._store[client] for client in clients]
        states = [self._state if self._all_travel and not own.get(_UNSENT) else self._started(own) for own in kept]
        for client, own in zip(clients, kept, strict=True):
            if not own.get(_UNSENT):
                self.record.download(client, self._download_bytes)
        return states, kept

    def _started(self, kept: ClientState) -> State:
        """The state that a client starts from which has some of its own."""
        own = {n: v for n, v in kept.get("model", {}).items() if n in self._start and self._reductions[n].own}
        mine = {**kept.get(_UNSENT, {}), **own}
        # What a store has kept on disk, or a checkpoint, comes back on the CPU.
        return {n: mine[n].to(v.device) if n in mine else v for n, v in self._start.items()}

    def upload(self, client_rounds: ClientRounds, states: Mapping[str, Tensor]) -> list[bool]:
        """Take in clients' states; whether each client's was taken."""
        missing = [name for name, reduction in self._reductions.items() if reduction.up and name not in states]
        if missing:
            raise ValueError(f"Expected clients' states with {quoted(missing)}, which travel up, but they have none.")
        taken, odd = self._finite(client_rounds, states)
        rows = [row for row, fine in enumerate(taken) if fine]
        if rows:
            sent = {name: states[name] for name, reduction in self._reductions.items() if reduction.up}
            if len(rows) < len(taken):
                sent = {name: value[rows] for name, value in sent.items()}
            sent = self.aggregator.set_aside(sent, odd)
            clients, weights = client_rounds.clients, self._weights(client_rounds)
            if len(rows) < len(taken):
                clients, weights = [clients[row] for row in rows], [weights[row] for row in rows]
            coded, each = self._coded(clients, sent)
            self.aggregator.add_all({**sent, **coded}, weights, self._numbers(clients))
            by_value = [name for name in sent if not self._reductions[name].by_shape]
            for i, client in enumerate(clients):
                self.record.upload(client, each + sum(self._reductions[n].wire_bytes(sent[n][i]) for n in by_value))
            self._leave_out(clients, sent)
            self.record.trained += clients
        return taken

    def _leave_out(self, clients: Sequence[str], sent: State) -> None:
        """Count no bytes of frozen parameters for the clients that have left them as they were."""
        for name in self._frozen:
            same = (sent[name] == self._state[name]).view(*sent[name].shape, 1).flatten(1).all(dim=1).tolist()
            if not all(same):
                self.changed.add(name)
            for client, value in itertools.compress(zip(clients, sent[name], strict=True), same):
                self.record.upload(client, -self._reductions[name].wire_bytes(value))

    def combine(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Take in what came to the other ranks."""
        self.aggregator.combine(ranks)
        self.record.combine(ranks, order)
        self.changed = set().union(*ranks.share(self.changed))

    def result(self) -> State:
        """The uploads brought together; what is frozen and no client has changed stays to the bit."""
        kept = {name: self._state[name] for name in self._frozen if name not in self.changed}
        return {**self.aggregator.result(self._state), **kept}

    def _finite(self, client_rounds: ClientRounds, states: Mapping[str, Tensor]) -> tuple[list[bool], list[str]]:
        """Whether all numbers are finite that a client sends, or goes on from; drop who has others.

        Numbers that are not finite with the server are no fault of a client's: the entries that have such.
        """
        numbers = {
            name: value
            for name, value in states.items()
            if (self._reductions[name].up or self._reductions[name].own)
            and (value.is_floating_point() or value.is_complex())
        }
        # A sum that is finite has finite terms; only where one is not must every number be looked at.
        if all(bool(torch.isfinite(value.sum())) for value in numbers.values()):
            return [True] * len(client_rounds), []
        begun = {n: torch.isfinite(self._start[n]) for n, v in numbers.items() if self._start[n].shape == v.shape[1:]}
        odd = [name for name, sound in begun.items() if self._reductions[name].up and not sound.all()]
        sound = {n: torch.isfinite(v) | ~begun[n] if n in begun else torch.isfinite(v) for n, v in numbers.items()}
        finite = {name: value.view(*value.shape, 1).flatten(1).all(dim=1) for name, value in sound.items()}
        taken: list[bool] = torch.stack(list(finite.values())).all(dim=0).tolist()
        for row in (row for row, fine in enumerate(taken) if not fine):
            self._drop(client_rounds[row], [name for name, fine in finite.items() if not fine[row]])
        return taken, odd

    def _drop(self, client_round: ClientRound, at_fault: Sequence[str]) -> None:
        client, kept = client_round.client, self._store[client_round.client]
        if _UNSENT in kept:  # from which it would never recover
            self._store[client] = {section: memory for section, memory in kept.items() if section != _UNSENT}
        names = listed(at_fault, most=3)
        self.record.dropped[client] = f"not finite: {names}"
        message = "Round %d: dropped the upload of client %s (not finite: %s). %s"
        log.warning(message, client_round.round, client, names, DIVERGED)

    def _coded(self, clients: Sequence[str], sent: State) -> tuple[State, int]:
        """What the server decodes in place of some entries, and bytes per client of all whose bytes do not vary."""
        coded: State = {}
        code_bytes = 0
        if self._compression is not None:
            names = [name for name in self._learnt if self._reductions[name].name == "mean"]
            coded = {name: sent[name] for name in names if self._compression.saves(self._state[name])}
            residuals = [self._store[client].get(_RESIDUAL, {}) for client in clients]
            coded, left, code_bytes = transmit(self._compression, self._state, coded, residuals)
            self._residuals.update(zip(clients, left, strict=True))  # what is left over waits for `keep`
        plain = [value for name, value in sent.items() if name not in coded and self._reductions[name].by_shape]
        return coded, code_bytes + sum(value.nbytes for value in plain) // len(clients)

    def keep(
        self, client: str, state: Mapping[str, Tensor], memories: Mapping[str, Memory], missed: bool = False
    ) -> None:
        """Keep what stays with a client: its own entries of ``state``, what it could not send, and ``memories``."""
        own = {n: v.detach().clone() for n, v in state.items() if self._reductions[n].own}
        unsent = {n: v.detach().clone() for n, v in state.items() if missed and self._reductions[n].up}
        sections = {"model": own, _UNSENT: unsent, _RESIDUAL: self._residuals.pop(client, {}), **memories}
        kept: ClientState = {section: memory for section, memory in sections.items() if memory}
        if kept or self._store[client]:
            self._store[client] = kept
