"""What a fit of a federation is made of, and the model that a client predicts with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_fcl.data.attached import need_stream, stream_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.reading_check import prepare_reading
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError, listed, warn_of_one
from lightning_fcl.federation.aggregation import State, entries, load_entries, reductions_of
from lightning_fcl.federation.client_store import own_entries
from lightning_fcl.federation.local_training import BringsLocalTrainer, LocalTrainer
from lightning_fcl.federation.obstacles import Obstacle
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.federation.schedule import Participation
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.local.single_sample import has_single_samples, why_not_single_sample
from lightning_fcl.methods.compose import methods_of
from lightning_fcl.methods.declaration import Declaration, client_of, overriding
from lightning_fcl.methods.functional import trainable
from lightning_fcl.methods.trial import first_rows
from lightning_fcl.simulation.epoch_states import EpochStates
from lightning_fcl.simulation.limits import check_stream, choose_trainer, require_begun

if TYPE_CHECKING:
    from lightning_fcl.simulation.isolation import Isolation
    from lightning_fcl.simulation.round import Round
    from lightning_fcl.simulation.strategy import FederatedStrategy

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Federation:
    """What a fit of a federation is made of.

    Args:
        strategy: The Trainer's strategy, with its settings.
        server: The server: its state, the record of the round, and the store of what clients keep.
        participation: Who takes part.
        shows_client: Whether the module is a client's model: see `client_model`.
        methods: The methods among the Trainer's callbacks.
        placement: Whose clients train where; None before a fit.
        trainer: Who trains the clients.
        why_one_at_a_time: The obstacle to vectorized training; None if clients train vectorized.
        epoch_states: Metrics, lists and counters that processes merge when a round ends.
        optimizers: The module's optimizers: several only where it optimises by hand.
        isolation: State outside the module that training reads. None before the first round and if clients train
            vectorized.
    """

    strategy: FederatedStrategy
    server: FederatedServer
    participation: Participation
    shows_client: bool = False
    methods: list[Declaration] = field(default_factory=list)
    placement: Placement | None = None
    trainer: LocalTrainer = field(init=False)
    why_one_at_a_time: Obstacle | None = field(init=False, default=None)
    epoch_states: EpochStates = field(init=False)
    optimizers: list[Optimizer] = field(init=False)
    isolation: Isolation | None = None

    @property
    def module(self) -> L.LightningModule:
        """The module that the Trainer trains."""
        return require_begun(self.strategy.lightning_module, "a Trainer")

    @property
    def stream(self) -> FederatedStream:
        """The clients' data."""
        return need_stream(self.module.trainer)

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""
        return self.strategy.seed

    @property
    def round(self) -> Round:
        """The round at hand."""
        return require_begun(self.strategy.round, "a fit")

    @property
    def batches(self) -> int:
        """The batches of the client that trains now, or of the one that has most; 0: none does."""
        at_hand = self.strategy.round
        return len(at_hand.cohort) if at_hand is not None and at_hand.cohort is not None else 0

    @property
    def scheduled(self) -> bool:
        """Whether learning rates change within a client's round."""
        return self.strategy.local_steps.scheduled

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
        stream = stream_of(self.module.trainer) if self.strategy.connected else None
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


def begin_fit(federation: Federation, optimizers: list[Optimizer], step: Callable[..., Any]) -> None:
    """Choose who trains the clients of a fit, when its loaders are made.

    Args:
        federation: The federation.
        optimizers: The module's optimizers.
        step: Lightning's own training step.
    """
    trainer, stream, server, ranks = (
        federation.module.trainer,
        federation.stream,
        federation.server,
        federation.strategy.ranks,
    )
    federation.optimizers, federation.methods = optimizers, methods_of(trainer)
    federation.isolation = None
    federation.participation.seed, federation.epoch_states = federation.seed, EpochStates(ranks)
    check_stream(trainer, stream)
    if (rows := first_rows(stream)) is not None:
        prepare_reading(stream.samples, rows, stream.seed, warn=ranks.rank == 0)
    named = [client for m in federation.methods if not isinstance(m.clients, str) for client in m.clients]
    server.check_clients(stream.plan.clients, [*named, *federation.participation.named])
    federation.participation.check_rounds(stream.plan.rounds)
    announce_participation(federation)
    server.store.keep_pixels(stream.samples.pixels)
    server.seed = federation.seed
    server.senders = [method.section for method in overriding(federation.methods, "message")]
    server.numbers = {client: number for number, client in enumerate(stream.plan.clients)}
    federation.trainer, federation.why_one_at_a_time = choose_trainer(federation, step)
    choose_min_batch_size(federation, optimizers)
    if federation.placement is None or federation.placement.ranks is not ranks:
        federation.placement = Placement(ranks, stream.plan.clients, server.store)


def choose_min_batch_size(federation: Federation, optimizers: Sequence[Optimizer]) -> None:
    """Let batches have at least two samples if some have one and the module cannot train on one.

    A last batch of one sample then joins the batch before it, and a client with one sample in a round is skipped.

    Args:
        federation: The federation.
        optimizers: The module's optimizers; empty while they are made.

    Raises:
        ValueError: If all batches have one sample.
    """
    module, stream = federation.module, federation.stream
    tried = has_single_samples(stream) and not isinstance(module, BringsLocalTrainer)
    why = why_not_single_sample(module, optimizers, stream) if tried else None
    stream.min_batch_size = federation.participation.min_samples = 1 if why is None else 2
    if why is None:
        return
    if stream.batch_size == 1:
        raise InvalidValueError(
            f"Expected `batch_size` to be at least 2 for `{type(module).__name__}`, which cannot train on a batch of "
            f"one sample ({why}), but got 1.",
            hint="Use `batch_size=2` or more.",
            argument="batch_size",
        )
    rounds = stream.plan.different_rounds
    single = [c for c in stream.plan.clients if any(len(current.get(c, ())) == 1 for current in rounds)]
    if single and federation.strategy.ranks.rank == 0:
        log.warning(
            "`%s` cannot train on a batch of one sample (%s). Rounds in which a client has one sample are skipped for "
            "this client: %s.",
            type(module).__name__,
            why,
            listed(single),
        )


def announce_participation(federation: Federation) -> None:
    """Log how many clients train in a round. Warn if their number is the integer 1, which is not the share 1.0."""
    clients, participation = len(federation.stream.plan.clients), federation.participation
    described = participation.describe(clients)
    rank_zero_info(f"Federation: {described}")
    if clients > 1:
        warn_of_one("participation", participation.clients, described, "all clients")


def warn_of_own_entries(federation: Federation) -> None:
    """Say whose model is tested, where each client has entries of its own."""
    rules = reductions_of(federation.module, federation.strategy.rules)
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
