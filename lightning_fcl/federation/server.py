"""Federation: the server's state, what its clients keep, and what travels between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import (
    Aggregator,
    Reduction,
    ServerOptimizer,
    State,
    entries,
    neutral,
    reductions_of,
    travels_down,
    travels_up,
    wire_bytes,
)
from lightning_fcl.federation.client_store import ClientState, ClientStore, Memory
from lightning_fcl.federation.compression import Compression, transmit

log = logging.getLogger(__name__)

_UNSENT = "unsent"  # the section of what a client could not send
_RESIDUAL = "residual"  # and of what compression has left over

ClientWeights = Literal["samples", "trained", "uniform"] | dict[str, float]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


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
        master: In a swarm, the client that brought the uploads together.
    """

    trained: list[str] = field(default_factory=list)
    upload_bytes: dict[str, int] = field(default_factory=dict)
    download_bytes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    master: str | None = None

    def upload(self, client: str, number: int) -> None:
        """Count bytes that a client sends: its state, or what a method sends beside it."""
        self.upload_bytes[client] = self.upload_bytes.get(client, 0) + number

    def download(self, client: str, number: int) -> None:
        """Count bytes that a client receives."""
        self.download_bytes[client] = self.download_bytes.get(client, 0) + number


def own_entries(kept: ClientState, device: torch.device) -> State:
    """What a client goes on from in place of the server's: its own entries, and what it could not send.

    Example:
        >>> own_entries({"model": {"head": torch.ones(1)}}, torch.device("cpu"))
        {'head': tensor([1.])}
    """
    return {name: value.to(device) for part in ("model", _UNSENT) for name, value in kept.get(part, {}).items()}


class FederatedServer:
    """The server and its clients between two rounds, and the two messages of a round: download and upload.

    It knows nothing of how clients train.

    Args:
        store: Keeps the clients' states.
        client_weights: A client's weight in means: its ``"samples"`` of the round, all it ``"trained"`` on (these and
            the remembered ones), ``"uniform"``, or a number each.
        server_optimizer: Makes the optimizer that steps the server on the pseudo-gradient.
        trim: Fraction cut at each end by the ``trimmed_mean`` reduction.
        byzantine: Number of lying clients that the ``krum`` reduction allows for.
        compression: Code of the uploads of trainable parameters whose reduction is ``mean``. Buffers travel as they
            are: what is left over of a variance could make it negative.

    Raises:
        ValueError: If ``client_weights`` is none of these.

    Example:
        >>> federation = FederatedServer(ClientStore())
        >>> federation.begin(nn.Linear(1, 1, bias=False))
        >>> federation.upload([ClientRound("a", round=0, samples=2)], {"weight": torch.tensor([[[3.0]]])})
        [True]
        >>> federation.finish_round()["weight"]
        tensor([[3.]])
    """

    def __init__(
        self,
        store: ClientStore,
        client_weights: ClientWeights = "samples",
        server_optimizer: OptimizerFactory | None = None,
        trim: float = 0.1,
        byzantine: int = 0,
        compression: Compression | None = None,
    ) -> None:
        if isinstance(client_weights, str) and client_weights not in ("samples", "trained", "uniform"):
            raise ValueError(
                'Expected `client_weights` to be "samples", "trained", "uniform" or a weight per client but got '
                f'"{client_weights}".'
            )
        self.store = store
        if not isinstance(client_weights, str):
            client_weights = {str(client): weight for client, weight in client_weights.items()}
        if not 0 <= trim < 0.5:
            raise ValueError(f"Expected `trim` to be at least 0 and below 0.5 but got {trim}.")
        if byzantine < 0:
            raise ValueError(f"Expected `byzantine` to be at least 0 but got {byzantine}.")
        self.client_weights: ClientWeights = client_weights
        self.trim = trim
        self.byzantine = byzantine
        self.compression = compression
        self.state: State = {}
        self.reductions: dict[str, Reduction] = {}
        self.record = RoundRecord()
        self._factory = server_optimizer
        self._server_optimizer: ServerOptimizer | None = None
        self._restored: dict[str, Any] = {}
        self._residuals: dict[str, Memory] = {}  # of this round's uploads, until they are kept
        self._learnt: list[str] = []  # the trainable parameters that clients send in this round
        self._aggregator = Aggregator({})
        self._download_bytes = 0
        self._all_travel = True

    def begin(self, module: nn.Module, rules: Mapping[str, str] | None = None) -> None:
        """Begin a fit with a module's state as the server's. See `begin_round`."""
        if self._server_optimizer is not None:  # of an earlier fit, which this one continues
            self._restored = self._server_optimizer.state_dict()
            self._server_optimizer = None
        self.begin_round(module, rules)

    def begin_round(self, module: nn.Module, rules: Mapping[str, str] | None = None) -> None:
        """Take a module's state as the server's, and forget the uploads and the log of the round before.

        Args:
            module: Its own ``reductions`` attribute, if it has one, declares its entries, in each round anew.
            rules: Pattern -> reduction, over the module's own.
        """
        state = entries(module)
        self.reductions = reductions_of(module, rules)
        self._set_state({name: value.detach().clone() for name, value in state.items()})
        self._learnt = [n for n, p in module.named_parameters() if p.requires_grad and travels_up(self.reductions[n])]
        if self._factory is not None and self._server_optimizer is None and self._learnt:
            self._server_optimizer = ServerOptimizer(self._factory, self._learnt)
            self._server_optimizer.load_state_dict(self._restored)
        self.record, self._residuals = RoundRecord(), {}
        self._aggregator = Aggregator(self.reductions, self.trim, self.byzantine)

    @property
    def has_server_optimizer(self) -> bool:
        """Whether an optimizer steps the server."""
        return self._factory is not None

    @property
    def personal(self) -> bool:
        """Whether anything stays with the clients: entries, or what compression has left over."""
        return "none" in self.reductions.values() or self.compression is not None

    def _set_state(self, state: State) -> None:
        self.state = state
        down = {name: value for name, value in state.items() if travels_down(self.reductions[name])}
        self._download_bytes = sum(wire_bytes(value, self.reductions[name]) for name, value in down.items())
        self._all_travel = len(down) == len(state)

    def download(self, client: str) -> tuple[State, ClientState]:
        """The state that a client starts a round from (the server's, and its own entries), and all that it has kept."""
        kept = self.store[client]
        own = kept.get("model", {})
        unsent = kept.get(_UNSENT, {})
        if not unsent:
            self.record.download(client, self._download_bytes)
        if self._all_travel and not unsent:
            return self.state, kept
        # What a store has kept on disk, or a checkpoint, comes back on the CPU.
        state = {
            name: own[name].to(value.device)
            if name in own and self.reductions[name] == "none"
            else unsent[name].to(value.device)
            if name in unsent
            else neutral(value, self.reductions[name])
            for name, value in self.state.items()
        }
        return state, kept

    def upload(self, client_rounds: Sequence[ClientRound], states: Mapping[str, Tensor]) -> list[bool]:
        """Take in clients' states; a client with a number that is not finite is refused.

        Args:
            client_rounds: The clients.
            states: Their states, every entry of shape (clients, ...).

        Returns:
            Whether each client's upload was taken.
        """
        taken = [True] * len(client_rounds)
        own = {name: value for name, value in states.items() if self.reductions[name] not in ("download", "fixed")}
        numbers = {name: value for name, value in own.items() if value.is_floating_point() or value.is_complex()}
        # A sum that is finite has finite terms; only where one is not must every number be looked at.
        if not all(bool(torch.isfinite(value.sum())) for value in numbers.values()):
            finite = {
                n: torch.isfinite(value).view(*value.shape, 1).flatten(1).all(dim=1) for n, value in numbers.items()
            }
            taken = torch.stack(list(finite.values())).all(dim=0).tolist()
            for row in (row for row, fine in enumerate(taken) if not fine):
                self._drop(client_rounds[row], [name for name, fine in finite.items() if not fine[row]])
        rows = [row for row, fine in enumerate(taken) if fine]
        if rows:
            travelling = {name: value for name, value in states.items() if travels_up(self.reductions[name])}
            if len(rows) < len(client_rounds):
                travelling = {name: value[rows] for name, value in travelling.items()}
            sparse = {n: v for n, v in travelling.items() if self.reductions[n] == "sparse_mean"}
            dense = {n: v for n, v in travelling.items() if n not in sparse}
            each = sum(value.nbytes for value in dense.values()) // len(rows)
            if self.compression is not None:
                dense, each = self._compress(self.compression, [client_rounds[row].client for row in rows], dense)
            self._aggregator.add_all({**dense, **sparse}, [self._weight(client_rounds[row]) for row in rows])
            for i, row in enumerate(rows):
                rest = sum(wire_bytes(value[i], self.reductions[name]) for name, value in sparse.items())
                self.record.upload(client_rounds[row].client, each + rest)
            self.record.trained += [client_rounds[row].client for row in rows]
        return taken

    def _compress(self, compression: Compression, clients: Sequence[str], states: State) -> tuple[State, int]:
        """The states as the server decodes them, and bytes per client; what is left over waits for `keep`."""
        coded = {
            name: states[name]
            for name in self._learnt
            if self.reductions[name] == "mean" and compression.saves(self.state[name])
        }
        received, left, nbytes = transmit(
            compression, self.state, coded, [self.store[client].get(_RESIDUAL, {}) for client in clients]
        )
        self._residuals.update(zip(clients, left, strict=True))
        plain = [value for name, value in states.items() if name not in coded]
        return {**states, **received}, nbytes + sum(value.nbytes for value in plain) // len(clients)

    def _drop(self, client_round: ClientRound, entries_at_fault: Sequence[str]) -> None:
        kept = self.store[client_round.client]
        if _UNSENT in kept:  # from which it would never recover
            self.store[client_round.client] = {
                section: memory for section, memory in kept.items() if section != _UNSENT
            }
        names = ", ".join(entries_at_fault[:3]) + (" ..." if len(entries_at_fault) > 3 else "")
        self.record.dropped[client_round.client] = f"not finite: {names}"
        log.warning(
            "Round %d: dropped the upload of client %s (not finite: %s).",
            client_round.round,
            client_round.client,
            names,
        )

    def _weight(self, client_round: ClientRound) -> float:
        if self.client_weights == "samples":
            return float(client_round.samples)
        if self.client_weights == "trained":
            return float(client_round.samples + client_round.rehearsed)
        return 1.0 if isinstance(self.client_weights, str) else self.client_weights[client_round.client]

    def keep(
        self, client: str, state: Mapping[str, Tensor], memories: Mapping[str, Memory], missed: bool = False
    ) -> None:
        """Keep what stays with a client: the entries of ``state`` without reduction, and ``memories`` by section.

        A client that ``missed`` the synchronisation keeps what it would have sent, and goes on from it.
        """
        own = {n: v.detach().clone() for n, v in state.items() if self.reductions[n] == "none"}
        unsent = {n: v.detach().clone() for n, v in state.items() if missed and travels_up(self.reductions[n])}
        sections = {"model": own, _UNSENT: unsent, _RESIDUAL: self._residuals.pop(client, {}), **memories}
        kept: ClientState = {section: memory for section, memory in sections.items() if memory}
        if kept or self.store[client]:
            self.store[client] = kept

    def finish_round(self) -> State:
        """Bring the uploads together; the new server state."""
        aggregate = self._aggregator.result(self.state)
        if not self._aggregator.uploads:
            log.warning("No upload of this round was usable: the server state stays as it was.")
        elif self._server_optimizer is not None and self._learnt:
            aggregate = self._server_optimizer.step(self.state, aggregate)
        self._set_state(aggregate)
        return aggregate

    def check_clients(self, known: Sequence[str], named: Iterable[str] = ()) -> None:
        """Refuse weights, or other settings that name clients, which do not fit the stream's clients.

        Raises:
            ValueError: If a client is named that does not exist, or has no positive weight.
        """
        weights = self.client_weights if isinstance(self.client_weights, dict) else None
        unknown = sorted({*named, *(weights or ())} - set(known))
        if unknown:
            raise ValueError(f"Expected clients of the stream ({', '.join(known)}) but got {', '.join(unknown)}.")
        if weights is not None and (set(known) - set(weights) or min(weights.values()) <= 0):
            missing = sorted(set(known) - set(weights))
            raise ValueError(
                f"Expected `client_weights` to give each client a positive weight but it misses {missing} or has "
                f"{weights}."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the server's state, which is the module's."""
        optimizer = self._server_optimizer.state_dict() if self._server_optimizer is not None else self._restored
        return {"clients": {client: self.store[client] for client in self.store}, "server_optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the clients' states of a checkpoint, before `begin`."""
        self.store.clear()
        for client, kept in state["clients"].items():
            self.store[client] = kept
        self._restored = state["server_optimizer"]
        self._server_optimizer = None
