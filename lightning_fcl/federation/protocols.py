"""What the parts of a federation may know of each other: typed contracts, and nothing else.

The small protocols say what a module may offer beyond Lightning's `training_step`. Whoever asks says
``isinstance(module, HasSampleLoss)``, and none is required. A user's module may have such names with other meanings:
those of `FederatedModule` count if it says so. How clients train is in `lightning_fcl.federation.local_trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.ranks import SINGLE_RANK, Ranks

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.optim import Optimizer
    from torchmetrics import Metric

    from lightning_fcl.data.stream import FederatedStream
    from lightning_fcl.federation.aggregation import State
    from lightning_fcl.federation.obstacles import Obstacle
    from lightning_fcl.federation.server import FederatedServer
    from lightning_fcl.federation.settings import FederationSettings
    from lightning_fcl.federation.synchronization import Participation


class CurrentRound(Protocol):
    """A round, and the client that trains in it now; None where several do side by side."""

    round_idx: int

    @property
    def client_round(self) -> ClientRound | None: ...
    @property
    def local_epoch(self) -> int: ...
    @property
    def last_batch(self) -> bool: ...


class FederationProtocol(Protocol):
    """What methods, tasks and callbacks know of a fit: see `lightning_fcl.simulation.federation.Federation`."""

    server: FederatedServer
    participation: Participation
    optimizers: list[Optimizer]
    is_client_model: bool
    settings: FederationSettings
    ranks: Ranks

    @property
    def module(self) -> L.LightningModule: ...
    @property
    def stream(self) -> FederatedStream: ...
    @property
    def seed(self) -> int: ...
    @property
    def current_round(self) -> CurrentRound: ...
    @property
    def batches(self) -> int: ...
    @property
    def has_lr_schedule(self) -> bool: ...
    def hosts(self, client: str) -> bool: ...
    def client_rounds(self, round_idx: int) -> Sequence[ClientRound]: ...
    def ending_clients(self, round_idx: int) -> Sequence[ClientRound]: ...
    def client_state_dict(self, client: str, server: State | None = None) -> State: ...


def find_federation(trainer: L.Trainer) -> FederationProtocol | None:
    """The federation that a Trainer runs; None for a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> find_federation(L.Trainer(barebones=True, accelerator="cpu")) is None
        True
    """
    federation: FederationProtocol | None = getattr(trainer.strategy, "federation", None)
    return federation


def require_federation(trainer: L.Trainer, name: str, reason: str) -> FederationProtocol:
    """The federation that a Trainer runs, for a callback that needs one.

    Args:
        trainer: The Trainer.
        name: The callback's name, for the message.
        reason: What a plain Trainer lacks, or what to do in one.

    Example:
        >>> import lightning.pytorch as L
        >>> require_federation(L.Trainer(barebones=True, accelerator="cpu"), "APFL", "it has no clients")
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidValueError: \
Expected a Trainer with `strategy="federated"` for `APFL` but got a plain one: it has no clients.
    """
    federation = find_federation(trainer)
    if federation is None:
        raise InvalidValueError(
            f'Expected a Trainer with `strategy="federated"` for `{name}` but got a plain one: {reason}.',
            argument="strategy",
        )
    return federation


def get_ranks(trainer: L.Trainer) -> Ranks:
    """The processes of a Trainer's federation; a plain Trainer's is alone.

    Example:
        >>> import lightning.pytorch as L
        >>> get_ranks(L.Trainer(barebones=True, accelerator="cpu")).num_ranks
        1
    """
    federation = find_federation(trainer)
    return federation.ranks if federation is not None else SINGLE_RANK


@runtime_checkable
class ClientEndListener(Protocol):
    """A callback that is told when a client's local training is done, the client's state in the module."""

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """After the upload of a client."""


@runtime_checkable
class ClientStateReader(ClientEndListener, Protocol):
    """A `ClientEndListener` that does not always look at the client's state: where nobody does, it is not loaded."""

    def needs_client_state(self, pl_module: L.LightningModule) -> bool:
        """Whether it does in the round that begins."""


@runtime_checkable
class RoundEndListener(Protocol):
    """A callback that is told when a round is done, the server's state in the module."""

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the aggregation."""


@runtime_checkable
class FederatedModule(Protocol):
    """A module that says ``lightning_fcl_protocols = True``: what it has by the names below means what they say.

    The library's tasks do.
    """

    lightning_fcl_protocols: ClassVar[bool]


@runtime_checkable
class HasSampleLoss(FederatedModule, Protocol):
    """A module that states the loss of samples apart from its training step."""

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of every sample, shape (batch,)."""


@runtime_checkable
class Vectorizable(HasSampleLoss, Protocol):
    """A module whose training step is the mean of its `sample_loss`, so that clients can train side by side."""

    def sequential_reason(self) -> Obstacle | None:
        """Return the obstacle to vectorized training that the module knows of, or None."""

    def update_train_loss(self, total: Tensor, samples: int) -> None:
        """Add to the training loss of the epoch."""


@runtime_checkable
class HasFeatures(FederatedModule, Protocol):
    """A module that tells the features behind its output."""

    @property
    def features(self) -> int:
        """How many there are."""

    def embed(self, x: Tensor) -> Tensor:
        """Features, shape (batch, features)."""


@runtime_checkable
class HasLogitMask(FederatedModule, Protocol):
    """A module that tells a sample apart among some classes only."""

    def mask_logits(self, output: Tensor, y: Tensor) -> Tensor:
        """The logits of these classes, -inf for others: same shape as ``output``."""


@runtime_checkable
class HasNumClasses(FederatedModule, Protocol):
    """A module that tells a number of classes apart."""

    num_classes: int


@runtime_checkable
class HasMetrics(FederatedModule, Protocol):
    """A module that says what its predictions are measured by, in place of accuracy."""

    def configure_metrics(self) -> Mapping[str, Metric]:
        """New metrics of ``(predictions, targets)``, by name; curves and matrices are of the first."""


@runtime_checkable
class HasLocalModels(FederatedModule, Protocol):
    """A module that tells whether a client's own state predicts: sums do not, before they are solved."""

    is_adapting: bool
    """Whether the module is not to be tested at all in the round at hand."""

    @property
    def client_state_predicts(self) -> bool:
        """Whether a client's state predicts in the round at hand."""


@runtime_checkable
class HasAggregationHook(FederatedModule, Protocol):
    """A module that has something left to do when the uploads have come together."""

    def on_after_aggregation(self) -> None:
        """The server's state is in the module: finish it, in closed form for example."""


@runtime_checkable
class HasFingerprint(FederatedModule, Protocol):
    """A module that has arguments which a checkpoint must share to be continued."""

    def fingerprint(self) -> Mapping[str, Any]:
        """The arguments, as plain values."""
