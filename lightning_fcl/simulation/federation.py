"""What a fit of a federation is made of, and the model that a client predicts with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import lightning.pytorch as L
from torch.optim import Optimizer

from lightning_fcl.data.attached import need_stream, stream_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidStateError, InvalidValueError, listed
from lightning_fcl.federation.aggregation import State, entries, load_entries, reductions_of
from lightning_fcl.federation.client_store import own_entries
from lightning_fcl.federation.local_training import LocalTrainer
from lightning_fcl.federation.obstacles import Obstacle
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.federation.ranks import ALONE, Ranks
from lightning_fcl.federation.schedule import Participation
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.settings import FederationSettings
from lightning_fcl.local.local_steps import LocalSteps
from lightning_fcl.local.loose_state import LooseState
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import Declaration, client_of, overriding
from lightning_fcl.methods.functional import trainable
from lightning_fcl.randomness import global_seed
from lightning_fcl.simulation.counters import ClientCounters
from lightning_fcl.simulation.epoch_states import EpochStates
from lightning_fcl.simulation.isolation import Isolation
from lightning_fcl.simulation.round_progress import RoundProgress
from lightning_fcl.simulation.trainer_limits import TrainerLimits

T = TypeVar("T")

log = logging.getLogger(__name__)


def require_begun(value: T | None, what: str) -> T:
    """Return a value that exists after a start. Raise InvalidStateError if the value is None.

    Args:
        value: The value.
        what: What has to have begun, for the message.
    """
    if value is None:
        raise InvalidStateError(f"Expected {what} to have begun but none has: the federation has nothing to work on.")
    return value


@dataclass(eq=False)
class Federation:
    """What a fit of a federation is made of.

    Args:
        settings: The settings.
        server: The server: its state, the record of the round, and the store of what clients keep.
        participation: Who takes part.
        shows_client: Whether the module is a client's model: see `client_model`.
        methods: The methods among the Trainer's callbacks.
        placement: Whose clients train where; None before a fit.
        local_trainer: Trains the clients.
        why_one_at_a_time: The obstacle to vectorized training; None if clients train vectorized.
        epoch_states: Metrics, lists and counters that processes merge when a round ends.
        optimizers: The module's optimizers: several only where it optimises by hand.
        isolation: State outside the module that training reads. None before the first round and if clients train
            vectorized.
        ranks: The processes of the federation.
        limits: The Trainer's limits of batches and epochs.
        local_steps: The optimizer steps of the clients that train.
        counters: The Trainer's counters of batches and steps.
        loose: State of the module beside its `state_dict` that starts anew with each client. None before a round, and
            if clients train vectorized.
        progress: The current round; None before a fit.
        lightning_module: The module that the Trainer trains; None if this process runs no Trainer.
    """

    settings: FederationSettings
    server: FederatedServer
    participation: Participation
    shows_client: bool = False
    methods: list[Declaration] = field(default_factory=list)
    placement: Placement | None = None
    local_trainer: LocalTrainer = field(init=False)
    why_one_at_a_time: Obstacle | None = field(init=False, default=None)
    epoch_states: EpochStates = field(init=False)
    optimizers: list[Optimizer] = field(init=False)
    isolation: Isolation | None = None
    ranks: Ranks = ALONE
    limits: TrainerLimits = field(default_factory=TrainerLimits)
    local_steps: LocalSteps = field(default_factory=LocalSteps)
    counters: ClientCounters = field(default_factory=ClientCounters)
    loose: LooseState | None = None
    progress: RoundProgress | None = None
    lightning_module: L.LightningModule | None = None

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        return require_begun(self.lightning_module, "a Trainer")

    @property
    def stream(self) -> FederatedStream:
        """The clients' data."""
        return need_stream(self.module.trainer)

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""
        return self.settings.seed if self.settings.seed is not None else global_seed()

    @property
    def round(self) -> RoundProgress:
        """The current round."""
        return require_begun(self.progress, "a fit")

    @property
    def batches(self) -> int:
        """The batches of the client that trains now, or of the one that has most; 0: none does."""
        progress = self.progress
        return len(progress.cohort) if progress is not None and progress.cohort is not None else 0

    @property
    def scheduled(self) -> bool:
        """Whether learning rates change within a client's round."""
        return self.local_steps.scheduled

    def use_optimizer(self, trainer: L.Trainer) -> None:
        """Let a Trainer step the optimizer of the clients that train, or else the module's optimizers."""
        own = self.local_trainer.optimizer if self.round.cohort is not None else None
        wanted = [own] if own is not None else self.optimizers
        if trainer.optimizers != wanted:
            trainer.optimizers = wanted

    def hosts(self, client: str) -> bool:
        """Whether this process looks after a client: it alone knows what the client keeps; before a fit, each does."""
        return self.placement is None or self.placement.hosts(client)

    def client_rounds(self, round: int) -> list[ClientRound]:
        """Return the clients that can train in a round, in the plan's order."""
        present = self.participation.candidates(self.stream.plan, round)
        return [self.stream.client_round(c, round) for c in self.stream.plan.train[round] if c in present]

    def ending_clients(self, round: int) -> list[ClientRound]:
        """Return the clients whose experience ends with a round, with or without samples in it, in the plan's order."""
        unavailable = self.participation.unavailable(round)
        parts = [self.stream.client_round(c, round) for c in self.stream.plan.clients if c not in unavailable]
        return [part for part in parts if part.last_round]

    def client_state(self, client: str, server: State | None = None) -> State:
        """The state that a client predicts with: the server's with its own entries, made personal by its methods.

        Args:
            client: The client.
            server: The server's state; None: that in the module. It comes back itself for a client with nothing of its
                own.
        """
        stream = stream_of(self.module.trainer) if self.lightning_module is not None else None
        if stream is None or client not in stream.plan.experiences:
            known = listed(stream.plan.clients) if stream is not None else "none before a fit"
            raise InvalidValueError(
                f"Expected `client` to be one of the stream's ({known}) but got {client}.",
                argument="client",
                value=client,
            )
        state = entries(self.module) if server is None else server
        if own := own_entries(self.server.store[client], self.module.device):
            state = {**state, **own}
        for method in overriding(methods_of(self.module.trainer), "personalize"):
            memory = self.server.store.memory(client, method.section)
            state = method.personalize(client_of(method, self.module, memory), state)
        return state


def warn_of_own_entries(federation: Federation) -> None:
    """Say whose model is tested, where each client has entries of its own."""
    rules = reductions_of(federation.module, federation.settings.rules)
    own = [name for name in trainable(federation.module) if rules[name].own]
    if own and not federation.shows_client:
        log.warning(
            "This is the server's model, whose %s%s no client has trained: each keeps its own. "
            "`with client_model(trainer, client):` puts a client's model in its place.",
            own[0],
            " (and more)" if len(own) > 1 else "",
        )


@contextmanager
def client_model(trainer: L.Trainer, client: str) -> Iterator[None]:
    """Within this, after a fit, the module is the model that a client predicts with, in place of the server's.

    Args:
        trainer: The Trainer.
        client: The client.

    Raises:
        ValueError: If there is no such client, the Trainer has none, or another client's model is there.
    """
    federation = need_federation(trainer, "client_model", "it has no clients")
    if federation.shows_client:
        raise InvalidValueError(
            f"Expected one `client_model` at a time but got that of {client} within another one's.",
            hint="Leave that first.",
            argument="client",
            value=client,
        )
    state = {name: value.detach().clone() for name, value in federation.client_state(client).items()}
    module = federation.module
    server = {name: value.detach().clone() for name, value in entries(module).items()}
    load_entries(module, state)
    federation.shows_client = True
    try:
        yield
    finally:
        federation.shows_client = False
        load_entries(module, server)
