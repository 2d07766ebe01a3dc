"""Local training of a client group: the protocol of local trainers, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import FederatedModule, FederationProtocol

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class LocalResult:
    """The result of the local training of a client group.

    Args:
        uploads: Uploads of the clients, each entry of shape (clients, ...).
        method_states: State of each method for each client.
        module_state: State of the client after training, if the group has only one client and the client's state is in
            the module. None: ``uploads`` contains the states of the clients.
        optimizer_state: Optimizer state of the only client of the group. None: the optimizer state is not kept.
        has_finite_loss: Whether the loss of each client was finite in every step, shape (clients,). None: not checked.
        step_losses: For each call of `training_step`, the loss of each client without the terms of methods, shape
            (clients with a batch,) or more. None in place of a step that has no loss. Empty: the losses are unknown.
    """

    uploads: State
    method_states: Sequence[Sequence[StateSection]]
    module_state: State | None = None
    optimizer_state: StateSection | None = None
    has_finite_loss: Tensor | None = None
    step_losses: Sequence[Tensor | None] = ()

    def trained_state(self, row: int) -> State:
        """Return the state of the client with index ``row`` in the group, after its training."""
        return (
            self.module_state
            if self.module_state is not None
            else {name: value[row] for name, value in self.uploads.items()}
        )


class LocalTrainer(Protocol):
    """An object that trains a client group in a round, from the downloaded states to the uploads.

    One object trains all clients of a fit, one group after the other. `lightning_fcl.local_training.sequential` and
    ``vectorized`` contain the default trainers. A module can provide its own trainer, see `HasLocalTrainer`.
    """

    @property
    def num_vectorized_clients(self) -> int:
        """Maximum number of clients per vectorized step."""

    @property
    def is_stacked(self) -> bool:
        """Whether batches have a first dimension for the clients, even if there is only one client."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer that Lightning steps in place of the module's optimizer. None: the module's optimizer."""

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        """Start the local training of a client group.

        Args:
            clients: The clients in the current round.
            states: State from which each client starts: the server's state with the client's local entries. Clients
                with identical states can share one object.
            method_states: State of each method for each client.
            optimizer_states: Optimizer state of each client. Empty if the client starts with a new optimizer.
        """

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        """Return the loss of one step.

        Args:
            batch: The batch. If batches are stacked, the batch contains only the clients that still have a batch, which
                are the first clients of the group. A `StepTrainer` gets a list of unpadded batches instead, one for
                each group of clients whose batches have the same shape.
            batch_idx: Index of the batch in the local training of this group. None: the module's step takes no index.
            weight: Weight of each sample in the mean of its client, shape (clients in the batch, batch). 0: padding.
                None: batches are not padded.
        """

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Call ``step`` without changing the finished clients, which come after the first ``active`` clients."""

    def finish(self) -> LocalResult:
        """Finish the local training of the client group and return the result."""


@runtime_checkable
class HasLocalTrainer(FederatedModule, Protocol):
    """A module that provides its own local trainer."""

    def configure_local_trainer(self, federation: FederationProtocol, loss_methods: Sequence[str]) -> LocalTrainer:
        """Return the local trainer for the clients of this module.

        Args:
            federation: The federation, which contains the settings for training.
            loss_methods: Names of the methods that add a term to the loss.
        """
