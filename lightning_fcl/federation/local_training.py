"""How some clients of a round train: what a local trainer is given, what it gives back, and who brings one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import RunsFederation, Speaks

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Trained:
    """What some clients' local training has come to.

    Args:
        uploads: What the clients send, every entry of shape (clients, ...).
        memories: For each client, the memory of each method.
        own: The only client's own state, which stands in the module; None: the clients' are their uploads.
        optimizer: The only client's optimizer's state; None where it does not last.
        finite: Whether the loss of each client's every step was finite, shape (clients,); None where nobody has looked.
    """

    uploads: State
    memories: Sequence[Sequence[Memory]]
    own: State | None = None
    optimizer: Memory | None = None
    finite: Tensor | None = None

    def state(self, row: int) -> State:
        """The state that a client's training has left."""
        return self.own if self.own is not None else {name: value[row] for name, value in self.uploads.items()}


class LocalTrainer(Protocol):
    """Trains some clients of a round, side by side: from what they receive to what they upload.

    One object trains all clients of a fit, some at a time. `lightning_fcl.local.sequential` and ``vectorized``
    have those for modules in general; a module may bring its own, see `BringsLocalTrainer`.
    """

    @property
    def clients_at_once(self) -> int:
        """How many clients train side by side."""

    @property
    def stacked(self) -> bool:
        """Whether batches have a first dimension for the clients, even if it is one client."""

    @property
    def optimizer(self) -> Optimizer | None:
        """What Lightning steps in place of the module's own optimizer; None: that one."""

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        """Begin with some clients.

        Args:
            clients: Their parts in the round.
            states: The state that each starts from: the server's, and its own entries; one object where they are alike.
            memories: What each remembers for each method.
            optimizers: What is left of each one's optimizer; empty where it begins afresh.
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

    def finish(self) -> Trained:
        """End these clients' local training."""


@runtime_checkable
class BringsLocalTrainer(Speaks, Protocol):
    """A module whose clients train in a way of their own."""

    def local_trainer(self, federation: RunsFederation, shaping: Sequence[str]) -> LocalTrainer:
        """The trainer of this module's clients.

        Args:
            federation: The federation, whose strategy says what is asked for.
            shaping: Names of the methods that add to the loss.
        """
