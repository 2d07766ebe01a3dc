"""The server: a federation's state from round to round."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import listed, of_clients, quoted
from lightning_fcl.federation.aggregation import (
    Reduction,
    Rules,
    State,
    entries,
    frozen_parameters,
    reductions_of,
    resolve,
)
from lightning_fcl.federation.client_store import ClientState, ClientStore, Memory
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.messages import Messages, RoundRecord, own_entries
from lightning_fcl.federation.optimizer_state import OptimizerFactory, make_optimizer, settings_of
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.server_optimizer import ServerOptimizer

__all__ = ["ClientWeights", "Extra", "FederatedServer", "OptimizerFactory", "RoundRecord", "own_entries"]

log = logging.getLogger(__name__)

ClientWeights = Literal["samples", "trained", "uniform"] | dict[str, float]
Extra = Mapping[str, tuple[Tensor, Reduction | str]]
"""Entries of the server's state beside the module's, such as ``"FedProto.prototypes"``: first value and reduction."""


class FederatedServer:
    """The server: its state from round to round, and the two messages of a round, download and upload.

    It knows nothing of how clients train.

    Args:
        store: Keeps the clients' states.
        client_weights: A client's weight in means: its ``"samples"`` of the round, all it ``"trained"`` on (these and
            the remembered ones), ``"uniform"``, or a number each.
        server_optimizer: Makes the optimizer that steps the server on the pseudo-gradient.
        compression: Code of the uploads of trainable parameters whose reduction is ``mean``. Buffers travel as they
            are: what is left over of a variance could make it negative.

    Raises:
        ValueError: If ``client_weights`` is none of these.

    Example:
        >>> import torch
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
        self.client_weights: ClientWeights = client_weights
        self.compression = compression
        self.state: State = {}
        self.numbers: dict[str, int] = {}  # of the clients, for an order that is not that in which they come
        self.extra: State = {}  # entries beside the module's, from round to round
        self.reductions: dict[str, Reduction] = {}
        self._factory = server_optimizer
        self._server_optimizer: ServerOptimizer | None = None
        self._restored: dict[str, Any] = {}
        self._learnt: list[str] = []  # the trainable parameters that clients send in this round
        self._frozen: list[str] = []  # the others, which travel only if training changes them all the same
        self._published: State | None = None  # of the frozen parameters, those that are still as every device got them
        self._untouched: list[str] | None = None  # their names, of a fit that goes on
        self._messages = self._new_messages()

    def begin(self, module: nn.Module, rules: Rules | None = None, extra: Extra | None = None) -> None:
        """Begin a fit with a module's state as the server's. See `begin_round`."""
        if self._server_optimizer is not None:  # of an earlier fit, which this one continues
            self._restored = self._server_optimizer.state_dict()
            self._server_optimizer = None
        self._published = None
        self.begin_round(module, rules, extra)

    def begin_round(self, module: nn.Module, rules: Rules | None = None, extra: Extra | None = None) -> None:
        """Take a module's state as the server's, and forget the uploads and the record of the round before.

        Args:
            module: Its own ``reductions`` attribute, if it has one, declares its entries, in each round anew.
            rules: Pattern -> reduction, over the module's own.
            extra: Entries beside the module's, which clients download and upload as all others. The server keeps their
                values from round to round, in ``extra``; the one given here counts where it has none yet.

        Raises:
            ValueError: As `lightning_fcl.federation.aggregation.declare` does, if an extra entry has the name of one of
                the module's, or if a learnt number is not finite.
        """
        self.reductions = reductions_of(module, rules)
        self.state = {name: value.detach().clone() for name, value in entries(module).items()}
        for name, (value, reduction) in (extra or {}).items():
            if name in self.state:
                raise ValueError(f"Expected extra entries beside those of the module but got `{name}`, which it has.")
            self.reductions[name] = resolve(name, reduction)
            self.state[name] = self.extra[name] = self.extra.get(name, value).detach().to(value.device, copy=True)
        self._learnt = [n for n, p in module.named_parameters() if p.requires_grad and self.reductions[n].up]
        self._find_frozen(module)
        self._check_finite(self.state, "before a round, as the module has it. Begin with a sound state")
        if self._factory is not None and self._server_optimizer is None and self._learnt:
            self._server_optimizer = ServerOptimizer(self._factory, self._learnt)
            self._server_optimizer.load_state_dict(self._restored)
        self._messages = self._new_messages()

    def _find_frozen(self, module: nn.Module) -> None:
        """The frozen parameters that a round may bring together, and those that no device needs to be sent."""
        self._frozen = frozen_parameters(module, self.reductions)
        if self._published is None:
            kept, self._untouched = self._frozen if self._untouched is None else self._untouched, None
            self._published = {name: self.state[name] for name in self._frozen if name in kept}
        self._published = {
            name: value
            for name, value in self._published.items()
            if name in self._frozen and torch.equal(value, self.state[name])
        }
        self.state.update(self._published)  # one tensor, not two

    def _new_messages(self) -> Messages:
        given = self._weights, self._numbers, self.compression, self._learnt, self._frozen, self._published or ()
        return Messages(self.store, self.state, self.reductions, *given)

    @property
    def record(self) -> RoundRecord:
        """What has happened in the round."""
        return self._messages.record

    @property
    def optimizer_settings(self) -> dict[str, Any] | None:
        """The settings of the optimizer that steps the server; None: none does."""
        if self._factory is None:
            return None
        return settings_of(make_optimizer(self._factory, [nn.Parameter(torch.zeros(1))], "server_optimizer"))

    @property
    def personal(self) -> bool:
        """Whether anything stays with the clients: entries, or what compression has left over."""
        return any(reduction.own for reduction in self.reductions.values()) or self.compression is not None

    def download(self, clients: Sequence[str]) -> tuple[list[State], list[ClientState]]:
        """The state that each client starts a round from, and all that it has kept.

        The state is the server's with the client's own entries: one object for all clients that have none.
        """
        return self._messages.download(clients)

    def upload(self, client_rounds: Sequence[ClientRound], states: Mapping[str, Tensor]) -> list[bool]:
        """Take in clients' states; a client with a number that is not finite is refused.

        Args:
            client_rounds: The clients.
            states: Their states, every entry of shape (clients, ...).

        Returns:
            Whether each client's upload was taken.

        Raises:
            ValueError: If an entry is missing that travels up.
        """
        parts = client_rounds if isinstance(client_rounds, ClientRounds) else ClientRounds.of(client_rounds)
        return self._messages.upload(parts, states)

    def keep(
        self, client: str, state: Mapping[str, Tensor], memories: Mapping[str, Memory], missed: bool = False
    ) -> None:
        """Keep what stays with a client: its own entries of ``state``, and ``memories`` by section.

        A client that ``missed`` the synchronisation keeps what it would have sent, and goes on from it.
        """
        self._messages.keep(client, state, memories, missed)

    def combine(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Take in what came to the other ranks: uploads, and what happened.

        Args:
            ranks: The ranks.
            order: Where a client stands in the round's order.

        Raises:
            ValueError: If a reduction takes in no other rank's uploads.
        """
        self._messages.combine(ranks, order)

    def finish_round(self) -> State:
        """Bring the uploads together; the new server state.

        Raises:
            ValueError: If the server's optimizer has made a number of it that is not finite.
        """
        aggregator = self._messages.aggregator
        aggregate = self._messages.result()
        if not aggregator.uploads:
            log.warning("No upload of this round was usable: the server state stays as it was.")
        elif self._server_optimizer is not None and self._learnt:
            aggregate = self._server_optimizer.step(self.state, aggregate)
            self._check_finite(aggregate, "after its optimizer's step. Lower the learning rate of `server_optimizer`")
        self.state = aggregate
        self.extra.update({name: aggregate[name] for name in self.extra if name in aggregate})
        self._messages.offer(aggregate)
        return aggregate

    def _check_finite(self, state: Mapping[str, Tensor], when: str) -> None:
        """Refuse a state with which every client would diverge: one with learnt numbers that are not finite."""
        wrong = [name for name in self._learnt if not torch.isfinite(state[name].sum())]
        wrong = [name for name in wrong if not torch.isfinite(state[name]).all()]
        if wrong:
            raise ValueError(f"Expected a server state of finite numbers but {quoted(wrong)} is not finite {when}.")

    def _weights(self, parts: ClientRounds) -> Sequence[float]:
        if isinstance(self.client_weights, dict):
            return [self.client_weights[client] for client in parts.clients]
        if self.client_weights == "uniform":
            return [1.0] * len(parts)
        numbers = parts.samples if self.client_weights == "samples" else parts.trained
        weights: list[float] = numbers.astype(float).tolist()
        return weights

    def _numbers(self, clients: Sequence[str]) -> list[int]:
        return [self.numbers.setdefault(client, len(self.numbers)) for client in clients]

    def check_clients(self, known: Sequence[str], named: Iterable[str] = ()) -> None:
        """Refuse weights, or other settings that name clients, which do not fit the stream's clients.

        Raises:
            ValueError: If a client is named that does not exist, or has no positive weight.
        """
        weights = self.client_weights if isinstance(self.client_weights, dict) else None
        of_clients("names", {*named, *(weights or ())}, known)
        without = [client for client in known if weights is not None and not weights.get(client, 0) > 0]
        if without:
            raise ValueError(
                f"Expected `client_weights` to give each client a positive weight but it gives none to "
                f"{listed(without)}."
            )

    def state_dict(self, clients: Mapping[str, ClientState] | None = None) -> dict[str, Any]:
        """What a checkpoint keeps beside the server's state, which is the module's.

        Args:
            clients: What clients keep, where the store has not all of it.
        """
        optimizer = self._server_optimizer.state_dict() if self._server_optimizer is not None else self._restored
        clients = {client: self.store[client] for client in self.store} if clients is None else clients
        untouched = [name for name in self._published or () if name not in self._messages.changed]
        return {"clients": clients, "server_optimizer": optimizer, "extra": self.extra, "untouched": untouched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint has kept, before `begin`.

        Raises:
            ValueError: If what it calls the clients' state is none.
        """
        clients = state["clients"]
        if not isinstance(clients, Mapping) or not all(map(_is_client_state, clients.values())):
            raise ValueError(
                f"Expected `clients` of the checkpoint to be what each client keeps, section by section, but got "
                f"{clients!r:.200}. Continue from another one."
            )
        self.store.replace(clients)
        self.extra = dict(state.get("extra", {}))
        self._restored = state["server_optimizer"]
        kept = state.get("untouched")
        self._untouched = kept if isinstance(kept, list) else None
        self._server_optimizer = None


def _is_client_state(kept: object) -> bool:
    return isinstance(kept, Mapping) and all(isinstance(section, Mapping) for section in kept.values())
