"""What a fit of a federation is made of, and the model that a client predicts with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import lightning.pytorch as L
from torch.optim import Optimizer

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import find_stream, require_stream
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.federation.aggregation import State, get_reductions, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import local_tensors
from lightning_fcl.federation.local_trainer import LocalTrainer
from lightning_fcl.federation.obstacles import Obstacle
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.federation.ranks import SINGLE_RANK, Ranks
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.settings import FederationSettings
from lightning_fcl.federation.synchronization import Participation
from lightning_fcl.local_training.gradient_accumulation import GradientAccumulation
from lightning_fcl.local_training.module_snapshot import ModuleSnapshot
from lightning_fcl.methods.base import MethodBase, make_client, methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.rng import global_seed
from lightning_fcl.simulation.counters import ClientCounters
from lightning_fcl.simulation.epoch_states import EpochStates
from lightning_fcl.simulation.isolation import Isolation
from lightning_fcl.simulation.round_progress import RoundProgress
from lightning_fcl.simulation.trainer_limits import TrainerLimits
from lightning_fcl.validation import format_names

T = TypeVar("T")

log = logging.getLogger(__name__)


def require_started(value: T | None, description: str) -> T:
    """Return a value that exists after a start. Raise InvalidStateError if the value is None.

    Args:
        value: The value.
        description: What has to have begun, for the message.
    """
    if value is None:
        raise InvalidStateError(
            f"Expected {description} to have begun but none has: the federation has nothing to work on."
        )
    return value


@dataclass(eq=False)
class Federation:
    """What a fit of a federation is made of.

    Args:
        settings: The settings.
        server: The server: its state, the record of the round, and the store of what clients keep.
        participation: Who takes part.
        is_client_model: Whether the module is a client's model: see `client_model`.
        methods: The methods among the Trainer's callbacks.
        placement: Whose clients train where; None before a fit.
        local_trainer: Trains the clients.
        sequential_reason: The obstacle to vectorized training; None if clients train vectorized.
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
    is_client_model: bool = False
    methods: list[MethodBase] = field(default_factory=list)
    placement: Placement | None = None
    local_trainer: LocalTrainer = field(init=False)
    sequential_reason: Obstacle | None = field(init=False, default=None)
    epoch_states: EpochStates = field(init=False)
    optimizers: list[Optimizer] = field(init=False)
    isolation: Isolation | None = None
    ranks: Ranks = SINGLE_RANK
    limits: TrainerLimits = field(default_factory=TrainerLimits)
    local_steps: GradientAccumulation = field(default_factory=GradientAccumulation)
    counters: ClientCounters = field(default_factory=ClientCounters)
    loose: ModuleSnapshot | None = None
    progress: RoundProgress | None = None
    lightning_module: L.LightningModule | None = None

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        return require_started(self.lightning_module, "a Trainer")

    @property
    def stream(self) -> FederatedStream:
        """The clients' data."""
        return require_stream(self.module.trainer)

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""
        return self.settings.seed if self.settings.seed is not None else global_seed()

    @property
    def current_round(self) -> RoundProgress:
        """The current round."""
        return require_started(self.progress, "a fit")

    @property
    def batches(self) -> int:
        """The batches of the client that trains now, or of the one that has most; 0: none does."""
        progress = self.progress
        return len(progress.client_group) if progress is not None and progress.client_group is not None else 0

    @property
    def has_lr_schedule(self) -> bool:
        """Whether learning rates change within a client's round."""
        return self.local_steps.scheduled

    def use_optimizer(self, trainer: L.Trainer) -> None:
        """Let a Trainer step the optimizer of the clients that train, or else the module's optimizers."""
        client_optimizer = self.local_trainer.optimizer if self.current_round.client_group is not None else None
        active_optimizers = [client_optimizer] if client_optimizer is not None else self.optimizers
        if trainer.optimizers != active_optimizers:
            trainer.optimizers = active_optimizers

    def hosts(self, client: str) -> bool:
        """Whether this process looks after a client: it alone knows what the client keeps; before a fit, each does."""
        return self.placement is None or self.placement.hosts(client)

    def client_rounds(self, round_idx: int) -> list[ClientRound]:
        """Return the clients that can train in a round, in the plan's order."""
        present = self.participation.candidates(self.stream.plan, round_idx)
        return [self.stream.client_round(c, round_idx) for c in self.stream.plan.train[round_idx] if c in present]

    def ending_clients(self, round_idx: int) -> list[ClientRound]:
        """Return the clients whose experience ends with a round, with or without samples in it, in the plan's order."""
        unavailable = self.participation.unavailable(round_idx)
        parts = [self.stream.client_round(c, round_idx) for c in self.stream.plan.clients if c not in unavailable]
        return [part for part in parts if part.is_last_round]

    def client_state_dict(self, client: str, server: State | None = None) -> State:
        """The state that a client predicts with: the server's with its own entries, made personal by its methods.

        Args:
            client: The client.
            server: The server's state; None: that in the module. It comes back itself for a client with nothing of its
                own.
        """
        stream = find_stream(self.module.trainer) if self.lightning_module is not None else None
        if stream is None or client not in stream.plan.experiences:
            client_names = format_names(stream.plan.clients) if stream is not None else "none before a fit"
            raise InvalidValueError(
                f"Expected `client` to be one of the stream's ({client_names}) but got {client}.",
                argument="client",
                value=client,
            )
        state = state_tensors(self.module) if server is None else server
        if client_entries := local_tensors(self.server.client_store[client], self.module.device):
            state = {**state, **client_entries}
        for method in methods_overriding(get_methods(self.module.trainer), "personalize"):
            memory = self.server.client_store.get_section(client, method.section_name)
            state = method.personalize(make_client(method, self.module, memory), state)
        return state


def warn_of_local_tensors(federation: Federation) -> None:
    """Say whose model is tested, where each client has entries of its own."""
    rules = get_reductions(federation.module, federation.settings.rules)
    local_names = [name for name in trainable_parameters(federation.module) if rules[name].is_local]
    if local_names and not federation.is_client_model:
        log.warning(
            "This is the server's model, whose %s%s no client has trained: each keeps its own. "
            "`with client_model(trainer, client):` puts a client's model in its place.",
            local_names[0],
            " (and more)" if len(local_names) > 1 else "",
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
    federation = require_federation(trainer, "client_model", "it has no clients")
    if federation.is_client_model:
        raise InvalidValueError(
            f"Expected one `client_model` at a time but got that of {client} within another one's.",
            hint="Leave that first.",
            argument="client",
            value=client,
        )
    state = {name: value.detach().clone() for name, value in federation.client_state_dict(client).items()}
    module = federation.module
    server = {name: value.detach().clone() for name, value in state_tensors(module).items()}
    load_state_tensors(module, state)
    federation.is_client_model = True
    try:
        yield
    finally:
        federation.is_client_model = False
        load_state_tensors(module, server)
