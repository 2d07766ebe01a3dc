"""How some clients of a round train: what a local trainer is given, what it gives back, and who brings one."""

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
    """What some clients' local training has come to.

    Args:
        uploads: What the clients send, every entry of shape (clients, ...).
        method_states: For each client, the memory of each method.
        module_state: The only client's own state, which stands in the module; None: the clients' are their uploads.
        optimizer_state: The only client's optimizer's state; None where it does not last.
        has_finite_loss: Whether the loss of each client's every step was finite, shape (clients,); None where nobody
            has looked.
    """

    uploads: State
    method_states: Sequence[Sequence[StateSection]]
    module_state: State | None = None
    optimizer_state: StateSection | None = None
    has_finite_loss: Tensor | None = None

    def trained_state(self, row: int) -> State:
        """The state that a client's training has left."""
        return (
            self.module_state
            if self.module_state is not None
            else {name: value[row] for name, value in self.uploads.items()}
        )


class LocalTrainer(Protocol):
    """Trains some clients of a round, side by side: from what they receive to what they upload.

    One object trains all clients of a fit, some at a time. `lightning_fcl.local_training.sequential` and ``vectorized``
    have those for modules in general; a module may bring its own, see `HasLocalTrainer`.
    """

    @property
    def num_vectorized_clients(self) -> int:
        """How many clients train side by side."""

    @property
    def is_stacked(self) -> bool:
        """Whether batches have a first dimension for the clients, even if it is one client."""

    @property
    def optimizer(self) -> Optimizer | None:
        """What Lightning steps in place of the module's own optimizer; None: that one."""

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        """Begin with some clients.

        Args:
            clients: Their parts in the round.
            states: The state that each starts from: the server's, and its own entries; one object where they are alike.
            method_states: What each remembers for each method.
            optimizer_states: What is left of each one's optimizer; empty where it begins afresh.
        """

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> Tensor | None:
        """One step's loss.

        Args:
            batch: The batch; where they are stacked, of the clients that still have one, which come first.
            batch_idx: Its number within these clients' local training; None where the module's step takes none.
            weight: Share of each sample in its client's mean, shape (these clients, batch), 0 for padding; None where
                batches are not stacked.
        """

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Call ``step``, with those clients left as they are that are done: all but the first ``active``."""

    def finish(self) -> LocalResult:
        """End these clients' local training."""


@runtime_checkable
class HasLocalTrainer(FederatedModule, Protocol):
    """A module whose clients train in a way of their own."""

    def configure_local_trainer(self, federation: FederationProtocol, loss_methods: Sequence[str]) -> LocalTrainer:
        """The trainer of this module's clients.

        Args:
            federation: The federation, whose strategy says what is asked for.
            loss_methods: Names of the methods that add to the loss.
        """
