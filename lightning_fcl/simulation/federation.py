"""A federation behind a strategy: the server, its clients and the round at hand; what methods and callbacks may see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.data.orders import Batching
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import listed
from lightning_fcl.federation.aggregation import Reduction, Rules, State, entries, load_entries
from lightning_fcl.federation.client_store import ClientState, Memory, own_entries
from lightning_fcl.federation.local_training import LocalTrainer, TrainerRequest
from lightning_fcl.federation.participation import Participation
from lightning_fcl.federation.ranks import ALONE, Ranks
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.server import Extra, FederatedServer
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import Declaration, shapes_loss
from lightning_fcl.methods.method import section as section_of
from lightning_fcl.randomness import start_randomness
from lightning_fcl.simulation.choose import choose_trainer
from lightning_fcl.simulation.limits import check_stream, there
from lightning_fcl.simulation.local_steps import LocalSteps
from lightning_fcl.simulation.loose_state import LooseState
from lightning_fcl.simulation.placement import Placement

if TYPE_CHECKING:
    from lightning_fcl.simulation.cohort import Cohort
    from lightning_fcl.simulation.round import Round

log = logging.getLogger(__name__)


class Federation:
    """The server, its clients and the round at hand, behind a strategy; what methods and callbacks may see of it.

    Args:
        server: The server.
        participation: Who takes part.
        local_epochs: Passes over a client's data per round.
        rules: Pattern of state entries -> reduction, over the module's own.
        cohort_size: Clients side by side, or ``"auto"``.
        keep_optimizer: Whether a client's optimizer state lasts from round to round.
        seed: Tells the seed of participation and of every client's randomness.
    """

    def __init__(
        self,
        server: FederatedServer,
        participation: Participation,
        local_epochs: int,
        rules: Rules,
        cohort_size: int | Literal["auto"],
        keep_optimizer: bool,
        seed: Callable[[], int],
    ) -> None:
        self.server = server
        self.participation = participation
        self.local_epochs = local_epochs
        self.rules = rules
        self.cohort_size = cohort_size
        self.keep_optimizer = keep_optimizer
        self.on_unusable_round: Literal["stop", "warn"] = "warn"
        self.methods: list[Declaration] = []
        self._trainer: LocalTrainer | None = None
        self.current: Round | None = None  # the round at hand
        self.cohort: Cohort | None = None  # the clients that train now, or have done so last in the round
        self._seed = seed
        self._module: L.LightningModule | None = None
        self._stream: FederatedStream | None = None
        self.local_steps = LocalSteps()
        self.loose: LooseState | None = None  # of a round whose clients train in the module
        self.ranks: Ranks = ALONE
        self._placement: Placement | None = None
        self._optimizer: Optimizer | None = None
        self._waiting: State | None = None  # while a client's model is in the module, after a fit

    # What it works on: all is there from the moment when the Trainer has its loaders.

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        return there(self._module, "a Trainer")

    @module.setter
    def module(self, module: L.LightningModule) -> None:
        self._module = module

    @property
    def attached(self) -> bool:
        """Whether there is a Trainer."""
        return self._module is not None

    @property
    def stream(self) -> FederatedStream:
        """The clients' data."""
        return there(self._stream, "a fit")

    @property
    def trainer(self) -> LocalTrainer:
        """Who trains the clients."""
        return there(self._trainer, "a fit")

    @trainer.setter
    def trainer(self, trainer: LocalTrainer) -> None:
        self._trainer = trainer

    @property
    def loaded(self) -> bool:
        """Whether there is a stream of clients' data."""
        return self._stream is not None

    def load(self, stream: FederatedStream, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        """Take the clients' data at the beginning of a fit, and choose who trains them.

        Args:
            stream: The clients' data.
            optimizer: The module's optimizer.
            step: Lightning's own training step.

        Raises:
            ValueError: If stream, methods and module do not go together.
        """
        self._stream, self._optimizer = stream, optimizer
        self.participation.seed = self.seed
        self.methods = methods_of(self.module.trainer)
        check_stream(self.module.trainer, self.stream)
        named = [client for m in self.methods if not isinstance(m.clients, str) for client in m.clients]
        self.server.check_clients(self.plan.clients, [*named, *self.participation.named])
        self.participation.check_rounds(self.plan.rounds)
        self.server.store.keep_pixels(self.stream.samples.pixels)
        self.server.numbers = {client: number for number, client in enumerate(self.plan.clients)}
        request = TrainerRequest(
            None if self.cohort_size == "auto" else self.cohort_size,
            [type(method).__name__ for method in self.methods if shapes_loss(method, {})],
            self.rules,
            self.participation.may_miss,
        )
        self.trainer = choose_trainer(
            self.module, self.methods, optimizer, self.stream, step, request, self.keep_optimizer, self.seed
        )

    @property
    def placement(self) -> Placement:
        """Whose clients train where."""
        if self._placement is None or self._placement.ranks is not self.ranks:
            steps = self.module.trainer.global_step
            self._placement = Placement(self.ranks, self.plan.clients, self.server.store, steps)
        return self._placement

    def kept(self) -> Mapping[str, ClientState]:
        """What all clients keep, on all ranks."""
        store = self.server.store
        return self._placement.everything() if self._placement else {client: store[client] for client in store}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has kept."""
        self.server.load_state_dict(kept)
        self._placement = None

    def begin_fit(self) -> None:
        """Take the module's state as the server's."""
        if self._waiting is not None:
            load_entries(self.module, self._waiting)
            self._waiting = None
        self.server.begin(self.module, self.rules, self.extra)

    @property
    def extra(self) -> Extra:
        """What the server keeps for methods, beside the module's entries, and how it comes together."""
        return {
            f"{method.section}.{name}": (value.to(self.module.device), method.reductions[name])
            for method in self.methods
            for name, value in method.server_state(self.module).items()
        }

    @property
    def between_rounds(self) -> bool:
        """Whether a checkpoint that is taken now can be continued."""
        return self.current is None or self.current.settled

    # What methods and callbacks may see.

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""
        return self._seed()

    @property
    def plan(self) -> Plan:
        """Who sees which samples when."""
        return self.stream.plan

    @property
    def round(self) -> int:
        """The round at hand, from 0."""
        return current_round(self.module.trainer)

    @property
    def record(self) -> RoundRecord:
        """What has happened in the round at hand, and bytes on the wire."""
        return self.server.record

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The reduction of every entry of the server's state in the round at hand."""
        return self.server.reductions

    @property
    def client_round(self) -> ClientRound | None:
        """The client that trains now; None between rounds, and where several train side by side."""
        return self.cohort.client_round if self.cohort is not None else None

    @property
    def local_epoch(self) -> int:
        """The local epoch, from 0, of the batch at hand."""
        return self.cohort.local_epoch if self.cohort is not None else 0

    @property
    def last_batch(self) -> bool:
        """Whether the batch at hand is the last one of its clients' local training."""
        return self.cohort is None or self.cohort.last_batch

    @property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        return there(self._optimizer, "a fit")

    @property
    def batching(self) -> Batching:
        """How a client's samples become batches."""
        return Batching(self.stream.batch_size, self.stream.shuffle, self.stream.drop_last)

    def hosts(self, client: str) -> bool:
        """Whether this process looks after a client: it alone knows what the client keeps."""
        return not self.loaded or self.placement.hosts(client)  # before a fit, each process fills its own store

    def drawn(self, round: int) -> list[str]:
        """The clients that are to train in a round, in the plan's order: as planned, where it is yet to come."""
        there_are_some = self.plan.train[round].keys() - self.participation.unavailable(round)
        return self.participation.draw(self.plan, round)[0] if there_are_some else []

    def client_rounds(self, round: int) -> list[ClientRound]:
        """The clients that have data in a round and are still there, in the plan's order."""
        unavailable = self.participation.unavailable(round)
        return [self.stream.client_round(c, round) for c in self.plan.train[round] if c not in unavailable]

    def samples(self, client: str, round: int) -> Batch:
        """A client's samples of a round, stacked: the same whenever they are asked for."""
        with isolate_rng():
            start_randomness(self.seed, client, round, "data")
            return self.stream.take(self.plan.train[round][client])

    def memory(self, client: str, section: str) -> Memory:
        """What a client keeps in a section: that of a method has its class's name."""
        return self.server.store[client].get(section, {})

    def remember(self, client: str, section: str, memory: Memory) -> None:
        """Keep something for a client in a section."""
        self.server.store[client] = {**self.server.store[client], section: memory}

    def kept_bytes(self, client: str) -> int:
        """Bytes of all that a client keeps now, images as stored pixels where the data set has such."""
        return self.server.store.nbytes(client)

    def server_state(self, section: str) -> State:
        """What the server keeps for a method, by name."""
        return section_of(self.server.extra, section)

    def forget(self, client: str) -> None:
        """Forget all that a client has kept; it takes part in no later round."""
        if self.server.store.in_memory or self.hosts(client):
            self.server.store[client] = {}
        self.participation.withdraw(client)

    def own_entries(self, client: str) -> State:
        """What a client goes on from in place of the server's entries."""
        return own_entries(self.server.store[client], self.module.device)

    def client_state(self, client: str, server: State | None = None) -> State:
        """The state that a client predicts with: the server's with its own entries, made personal by its methods.

        Args:
            client: The client.
            server: The server's state; None: that in the module, or that `load_client` has found there. It comes back
                itself for a client with nothing of its own.

        Raises:
            ValueError: If there is no such client.
        """
        if self._module is None or self._stream is None or client not in self.plan.experiences:
            known = listed(self.plan.clients) if self._stream is not None else "none before a fit"
            raise ValueError(f"Expected `client` to be one of the stream's ({known}) but got {client}.")
        state = server if server is not None else self._waiting
        state = entries(self.module) if state is None else state
        if own := self.own_entries(client):
            state = {**state, **own}
        for method in methods_of(self.module.trainer):
            state = method.personalize(self.memory(client, method.section), state)
        return state

    def load_client(self, client: str) -> None:
        """Put the model that a client predicts with into the module, in place of the server's: after a fit.

        Raises:
            ValueError: If there is no such client.
        """
        state = {name: value.detach().clone() for name, value in self.client_state(client).items()}
        if self._waiting is None:
            self._waiting = {name: value.detach().clone() for name, value in entries(self.module).items()}
        load_entries(self.module, state)

    @property
    def optimizer_in_use(self) -> Optimizer:
        """What Lightning steps now: the local trainer's own optimizer, or the module's."""
        own = self._trainer.optimizer if self._trainer is not None else None
        return own if own is not None else self.optimizer

    @property
    def holds_client(self) -> bool:
        """Whether the module holds a client's model, after a fit."""
        return self._waiting is not None

    def forget_server(self) -> None:
        """The module has a state of its own again: that of a checkpoint."""
        self._waiting = None
