"""What the parts of a federation may know of each other: typed contracts, and nothing else.

`LocalTrainer` trains some clients of a round, `FederationView` is what methods and callbacks may see of a running
federation, and the small protocols below them say what a module may offer beyond Lightning's `training_step`. A module
has what it has: whoever asks says ``isinstance(module, StatesLoss)``, and none is required.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.orders import Batching
from lightning_fcl.federation.aggregation import Reduction, Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.server import RoundRecord

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.optim import Optimizer
    from torchmetrics import Metric

    from lightning_fcl.data.scenarios import Plan

Batch = Any
"""A batch as a data set makes it: often ``[x, y]``, but any nest of lists, dicts and tensors."""


@dataclass(frozen=True)
class Start:
    """What some clients' local training begins with.

    Args:
        client_rounds: Their parts in the round.
        states: The state that each starts from: the server's, and its own entries; one object where they are the same.
        memories: What each remembers for each method.
        optimizers: What is left of each one's optimizer; empty where it begins afresh.
    """

    client_rounds: Sequence[ClientRound]
    states: Sequence[State]
    memories: Sequence[Sequence[Memory]]
    optimizers: Sequence[Memory]


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

    One object trains all clients of a fit, some at a time. `lightning_fcl.simulation.sequential` and ``vectorized``
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

    def begin(self, start: Start) -> None:
        """Begin with some clients."""

    def training_step(self, batch: Batch, batch_idx: int, weight: Tensor | None) -> Tensor | None:
        """One step's loss.

        Args:
            batch: The batch, stacked or not.
            batch_idx: Its number.
            weight: Share of each sample in its client's mean, shape (clients, batch), 0 for padding; None where batches
                are not stacked.
        """

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        """Call ``step``, with those clients left as they are that are done: all but the first ``active``."""

    def finish(self) -> Trained:
        """End these clients' local training."""

    def abort(self) -> None:
        """Forget these clients: the round was cut short."""


@runtime_checkable
class TakesGradients(Protocol):
    """A local trainer that tells its clients' gradients, stacked, in place of a backward pass through the loss."""

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """Those of the step whose loss is given, of all that `LocalTrainer.optimizer` steps, in its order."""


@runtime_checkable
class FederationView(Protocol):
    """What methods and callbacks may see of a running federation, and the little that they may change."""

    @property
    def seed(self) -> int:
        """The seed of participation and of every client's randomness."""

    @property
    def local_epochs(self) -> int:
        """Passes over a client's data per round, where no method says otherwise."""

    @property
    def keep_optimizer(self) -> bool:
        """Whether a client's optimizer state lasts from round to round."""

    @property
    def rules(self) -> Rules:
        """The reductions that the strategy was given, over those of the module."""

    @property
    def plan(self) -> Plan:
        """Who sees which samples when."""

    @property
    def round(self) -> int:
        """The round at hand, from 0."""

    @property
    def record(self) -> RoundRecord:
        """What has happened in the round at hand, and bytes on the wire."""

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The reduction of every entry of the server's state, as the module and the strategy declare it now."""

    @property
    def client_round(self) -> ClientRound | None:
        """The client that trains now; None between clients, and where several train side by side."""

    @property
    def local_epoch(self) -> int:
        """The local epoch, from 0, of the batch at hand."""

    @property
    def last_batch(self) -> bool:
        """Whether the batch at hand is the last one of its clients' local training."""

    @property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer."""

    @property
    def batching(self) -> Batching:
        """How a client's samples become batches."""

    def client_rounds(self, round: int) -> list[ClientRound]:
        """The clients that have data in a round and are still there, in the plan's order."""

    def samples(self, client: str, round: int) -> Batch:
        """A client's samples of a round, stacked: the same whenever they are asked for."""

    def memory(self, client: str, section: str) -> Memory:
        """What a client keeps in a section: that of a method has its class's name."""

    def remember(self, client: str, section: str, memory: Memory) -> None:
        """Keep something for a client in a section."""

    def own_entries(self, client: str) -> State:
        """What a client goes on from in place of the server's entries."""

    def client_state(self, client: str, server: State | None = None) -> State:
        """The state that a client predicts with."""

    def server_state(self, section: str) -> State:
        """What the server keeps for a method, by name."""

    def forget(self, client: str) -> None:
        """Forget all that a client has kept; it takes part in no later round."""


@runtime_checkable
class HostsFederation(Protocol):
    """A Trainer's strategy behind which there is a federation."""

    @property
    def federation(self) -> FederationView:
        """The federation."""


def federation_of(trainer: L.Trainer) -> FederationView | None:
    """The federation that a Trainer runs; None for a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> federation_of(L.Trainer(barebones=True, accelerator="cpu")) is None
        True
    """
    strategy = trainer.strategy
    return strategy.federation if isinstance(strategy, HostsFederation) else None


@runtime_checkable
class ListensToClients(Protocol):
    """A callback that is told when a client's local training is done, the client's state in the module."""

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """After the upload of a client."""


@runtime_checkable
class ListensToRounds(Protocol):
    """A callback that is told when a round is done, the server's state in the module."""

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the aggregation."""


@runtime_checkable
class StatesLoss(Protocol):
    """A module that states the loss of samples apart from its training step."""

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of every sample, shape (batch,)."""


@runtime_checkable
class Vectorizable(StatesLoss, Protocol):
    """A module whose training step is the mean of its `sample_loss`, so that clients can train side by side."""

    def why_not_vectorized(self) -> str | None:
        """The reason why the clients of this very module must train one at a time, or None."""

    def count_loss(self, total: Tensor, samples: int) -> None:
        """Add to the training loss of the epoch."""


@runtime_checkable
class EmbedsInputs(Protocol):
    """A module that tells the features behind its output."""

    @property
    def features(self) -> int:
        """How many there are."""

    def embed(self, x: Tensor) -> Tensor:
        """Features, shape (batch, features)."""


@runtime_checkable
class MasksLogits(Protocol):
    """A module that tells a sample apart among some classes only."""

    def mask_logits(self, output: Tensor, y: Tensor) -> Tensor:
        """The logits of these classes, -inf for others: same shape as ``output``."""


@runtime_checkable
class HasClasses(Protocol):
    """A module that tells a number of classes apart."""

    num_classes: int


@runtime_checkable
class MeasuresPredictions(Protocol):
    """A module that says what its predictions are measured by, in place of accuracy."""

    def measures(self) -> Mapping[str, Metric]:
        """New metrics of ``(predictions, targets)``, by name; curves and matrices are of the first."""


@runtime_checkable
class HasLocalModels(Protocol):
    """A module that tells whether a client's own state predicts: sums do not, before they are solved."""

    adapting: bool
    """Whether the module is not to be tested at all in the round at hand."""

    @property
    def local_models(self) -> bool:
        """Whether a client's state predicts in the round at hand."""


@runtime_checkable
class SolvesAtServer(Protocol):
    """A module that has something left to do when the uploads have come together."""

    def on_after_aggregation(self) -> None:
        """The server's state is in the module: finish it, in closed form for example."""


@runtime_checkable
class BringsLocalTrainer(Protocol):
    """A module whose clients train in a way of their own."""

    def local_trainer(self, request: TrainerRequest) -> LocalTrainer:
        """The trainer of this module's clients.

        Raises:
            ValueError: If it cannot honour what is asked for.
        """


@runtime_checkable
class HasHparams(Protocol):
    """A module that has arguments which a checkpoint must share to be continued."""

    def fingerprint(self) -> Mapping[str, Any]:
        """The arguments, as plain values."""


@dataclass(frozen=True)
class TrainerRequest:
    """What a federation asks of a local trainer.

    Args:
        clients_at_once: Clients side by side; None leaves it to the trainer.
        shaping: Names of the methods that add to the loss.
        rules: The reductions that the strategy was given, over those of the module.
        may_miss: Whether clients may miss a synchronisation, and go on from their own state.
    """

    clients_at_once: int | None = None
    shaping: Sequence[str] = ()
    rules: Rules = field(default_factory=dict)
    may_miss: bool = False
