"""The state of a federation during a fit, and the model that a client predicts with."""

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
from lightning_fcl.privacy.differential_privacy import PrivacyAccount
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
    """Return a value that is None before an event. Raise InvalidStateError if the value is None.

    Args:
        value: The value.
        description: The event after which the value exists, such as "a fit". The error message contains it.
    """
    if value is None:
        raise InvalidStateError(
            f"Expected {description} to have started, but none has started. Call `trainer.fit` first."
        )
    return value


@dataclass(eq=False)
class Federation:
    """The state of a federation during a fit.

    Args:
        settings: The settings.
        server: The server, which contains the server state, the record of the round, and the client states.
        participation: The object that samples the clients of each round.
        is_client_model: Whether the module currently has a client's model, see `client_model`.
        methods: The methods among the Trainer's callbacks.
        placement: The assignment of clients to processes. None before a fit.
        local_trainer: The object that trains the clients.
        sequential_reason: The obstacle to vectorized training. None if clients train vectorized.
        epoch_states: Metrics, lists and counters that processes merge at the end of a round.
        optimizers: The module's optimizers. Several optimizers require manual optimization.
        isolation: State outside the module that is reset for each client. None before the first round of a fit and if
            clients train vectorized.
        ranks: The processes of the federation.
        limits: The Trainer's limits of batches and epochs.
        local_steps: Gradient accumulation and learning rate schedules of the clients that currently train.
        counters: The Trainer's counters of batches and steps.
        loose: State of the module that is not in its `state_dict` and is restored for each client. None before a round
            and if clients train vectorized.
        progress: The current round. None before a fit.
        lightning_module: The module that the Trainer trains. None if this process runs no Trainer.
        privacy: The privacy account. None without differential privacy.
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
    privacy: PrivacyAccount | None = None

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
        """The seed of client sampling and of each client's random numbers."""
        return self.settings.seed if self.settings.seed is not None else global_seed()

    @property
    def current_round(self) -> RoundProgress:
        """The current round."""
        return require_started(self.progress, "a fit")

    @property
    def batches(self) -> int:
        """Number of batches of the client with the most batches among the current clients. 0 if no client trains."""
        progress = self.progress
        return len(progress.client_group) if progress is not None and progress.client_group is not None else 0

    @property
    def has_lr_schedule(self) -> bool:
        """Whether learning rates change within a client's round."""
        return self.local_steps.scheduled

    def use_optimizer(self, trainer: L.Trainer) -> None:
        """Set the Trainer's optimizers to the local trainer's optimizer while clients train.

        Between clients, or if the local trainer has no optimizer, set them to the module's optimizers.
        """
        client_optimizer = self.local_trainer.optimizer if self.current_round.client_group is not None else None
        active_optimizers = [client_optimizer] if client_optimizer is not None else self.optimizers
        if trainer.optimizers != active_optimizers:
            trainer.optimizers = active_optimizers

    @property
    def epsilon(self) -> float | None:
        """The epsilon of all releases so far. None without differential privacy, or without noise."""
        return None if self.privacy is None else self.privacy.epsilon()

    @property
    def privacy_summary(self) -> dict[str, str | float] | None:
        """The guarantee and the noise as plain values, for the record. None without differential privacy."""
        return None if self.privacy is None else self.privacy.summary()

    def hosts(self, client: str) -> bool:
        """Return whether this process stores the state of a client. True for every client before a fit."""
        return self.placement is None or self.placement.hosts(client)

    def client_rounds(self, round_idx: int) -> list[ClientRound]:
        """Return the clients that can train in a round, in the plan's order."""
        present = self.participation.candidates(self.stream.plan, round_idx)
        return [self.stream.client_round(c, round_idx) for c in self.stream.plan.train[round_idx] if c in present]

    def ending_clients(self, round_idx: int) -> list[ClientRound]:
        """Return the clients whose experience ends with a round, in the plan's order, even if they have no samples.

        Clients that have left the federation are left out.
        """
        unavailable = self.participation.unavailable(round_idx)
        parts = [self.stream.client_round(c, round_idx) for c in self.stream.plan.clients if c not in unavailable]
        return [part for part in parts if part.is_last_round]

    def client_state_dict(self, client: str, server: State | None = None) -> State:
        """Return the state that a client predicts with.

        This state is the server's state with the client-local tensors of the client. Methods that override
        `personalize` can change this state.

        Args:
            client: The client.
            server: The server's state. None: the current state of the module. If the client has no client-local tensors
                and no method changes the state, this object itself is returned, not a copy.

        Raises:
            ValueError: If the stream does not contain the client, or before a fit.
        """
        stream = find_stream(self.module.trainer) if self.lightning_module is not None else None
        if stream is None or client not in stream.plan.experiences:
            client_names = format_names(stream.plan.clients) if stream is not None else "there are none before a fit"
            raise InvalidValueError(
                f"Expected `client` to be one of the stream's clients ({client_names}), but got {client}.",
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
    """Warn if the server's model is evaluated although some of its parameters are client-local."""
    rules = get_reductions(federation.module, federation.settings.rules)
    local_names = [name for name in trainable_parameters(federation.module) if rules[name].is_local]
    if local_names and not federation.is_client_model:
        log.warning(
            "The module is the server's model. Client-local parameters of the server's model are not trained: %s%s. To "
            "evaluate a client's model, use `with client_model(trainer, client):`.",
            local_names[0],
            " and more" if len(local_names) > 1 else "",
        )


@contextmanager
def client_model(trainer: L.Trainer, client: str) -> Iterator[None]:
    """After a fit, temporarily load the model that a client predicts with into the module.

    On exit, the module has the server's model again.

    Args:
        trainer: The Trainer.
        client: The client.

    Raises:
        ValueError: If the stream does not contain the client, if the Trainer has no federation, or if the module
            already has a client's model.
    """
    federation = require_federation(trainer, "client_model", "it has no clients")
    if federation.is_client_model:
        raise InvalidValueError(
            f"Expected one `client_model` at a time, but got {client} while the module already has a client's model.",
            hint="Exit the other `with` block first.",
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
