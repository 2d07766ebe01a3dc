"""What the parts of a federation may know of each other: typed contracts, and nothing else.

`FederationView` is what methods and callbacks may see of a running federation, and the small protocols below it say
what a module may offer beyond Lightning's `training_step`. Whoever asks says ``isinstance(module, StatesLoss)``, and
none is required. A user's module may have such names with other meanings: those of `Speaks` count if it says so. How
clients train is in `lightning_fcl.federation.local_training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.orders import Batching
from lightning_fcl.federation.aggregation import Reduction, Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.ranks import ALONE, Ranks
from lightning_fcl.federation.record import RoundRecord

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.optim import Optimizer
    from torchmetrics import Metric

    from lightning_fcl.data.scenarios import Plan


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
    def ranks(self) -> Ranks:
        """The processes among which the clients are shared out: often one."""

    def hosts(self, client: str) -> bool:
        """Whether this process looks after a client: it alone knows what the client keeps."""

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

    def drawn(self, round: int) -> list[str]:
        """The clients that are to train in a round, in the plan's order: as planned, where it is yet to come."""

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

    def kept_bytes(self, client: str) -> int:
        """Bytes of all that a client keeps now, images as stored pixels where the data set has such."""

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


def need_federation(trainer: L.Trainer, name: str, why: str) -> FederationView:
    """The federation that a Trainer runs, for a callback that needs one.

    Args:
        trainer: The Trainer.
        name: The callback's name, for the message.
        why: What a plain Trainer lacks, or what to do in one.

    Raises:
        ValueError: If it is a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> need_federation(L.Trainer(barebones=True, accelerator="cpu"), "APFL", "it has no clients")
        Traceback (most recent call last):
        ValueError: Expected a Trainer with `strategy="federated"` for `APFL` but got a plain one: it has no clients.
    """
    federation = federation_of(trainer)
    if federation is None:
        raise ValueError(f'Expected a Trainer with `strategy="federated"` for `{name}` but got a plain one: {why}.')
    return federation


def ranks_of(trainer: L.Trainer) -> Ranks:
    """The processes of a Trainer's federation; a plain Trainer's is alone.

    Example:
        >>> import lightning.pytorch as L
        >>> ranks_of(L.Trainer(barebones=True, accelerator="cpu")).number
        1
    """
    federation = federation_of(trainer)
    return federation.ranks if federation is not None else ALONE


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
class Speaks(Protocol):
    """A module that says ``speaks_lightning_fcl = True``: what it has by the names below means what they say.

    The library's tasks do.
    """

    speaks_lightning_fcl: ClassVar[bool]


@runtime_checkable
class StatesLoss(Speaks, Protocol):
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
class EmbedsInputs(Speaks, Protocol):
    """A module that tells the features behind its output."""

    @property
    def features(self) -> int:
        """How many there are."""

    def embed(self, x: Tensor) -> Tensor:
        """Features, shape (batch, features)."""


@runtime_checkable
class MasksLogits(Speaks, Protocol):
    """A module that tells a sample apart among some classes only."""

    def mask_logits(self, output: Tensor, y: Tensor) -> Tensor:
        """The logits of these classes, -inf for others: same shape as ``output``."""


@runtime_checkable
class HasClasses(Speaks, Protocol):
    """A module that tells a number of classes apart."""

    num_classes: int


@runtime_checkable
class MeasuresPredictions(Speaks, Protocol):
    """A module that says what its predictions are measured by, in place of accuracy."""

    def measures(self) -> Mapping[str, Metric]:
        """New metrics of ``(predictions, targets)``, by name; curves and matrices are of the first."""


@runtime_checkable
class HasLocalModels(Speaks, Protocol):
    """A module that tells whether a client's own state predicts: sums do not, before they are solved."""

    adapting: bool
    """Whether the module is not to be tested at all in the round at hand."""

    @property
    def local_models(self) -> bool:
        """Whether a client's state predicts in the round at hand."""


@runtime_checkable
class SolvesAtServer(Speaks, Protocol):
    """A module that has something left to do when the uploads have come together."""

    def on_after_aggregation(self) -> None:
        """The server's state is in the module: finish it, in closed form for example."""


@runtime_checkable
class HasHparams(Speaks, Protocol):
    """A module that has arguments which a checkpoint must share to be continued."""

    def fingerprint(self) -> Mapping[str, Any]:
        """The arguments, as plain values."""
