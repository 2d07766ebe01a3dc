"""Protocols: typed contracts between the parts of a federation.

Most protocols describe optional functions of a module, in addition to Lightning's `training_step`. The library checks
for these functions, for example with ``isinstance(module, HasSampleLoss)``. A user's module can use the same names with
different meanings. Therefore a subclass of `FederatedModule` applies to a module only if the module has the attribute
``lightning_fcl_protocols``. The protocols of local training are in `lightning_fcl.federation.local_trainer`.
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
    """The current round and the client that trains.

    ``client_round`` is None if the batches are stacked for vectorized training.
    """

    round_idx: int

    @property
    def client_round(self) -> ClientRound | None: ...
    @property
    def local_epoch(self) -> int: ...
    @property
    def last_batch(self) -> bool: ...


class FederationProtocol(Protocol):
    """The attributes of `lightning_fcl.simulation.federation.Federation` that methods, tasks and callbacks use."""

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
    def epsilon(self) -> float | None: ...
    @property
    def privacy_summary(self) -> dict[str, str | float] | None: ...
    @property
    def has_lr_schedule(self) -> bool: ...
    def hosts(self, client: str) -> bool: ...
    def client_rounds(self, round_idx: int) -> Sequence[ClientRound]: ...
    def ending_clients(self, round_idx: int) -> Sequence[ClientRound]: ...
    def client_state_dict(self, client: str, server: State | None = None) -> State: ...


def find_federation(trainer: L.Trainer) -> FederationProtocol | None:
    """Return the federation that a Trainer runs, or None for a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> find_federation(L.Trainer(barebones=True, accelerator="cpu")) is None
        True
    """
    federation: FederationProtocol | None = getattr(trainer.strategy, "federation", None)
    return federation


def require_federation(trainer: L.Trainer, name: str, reason: str) -> FederationProtocol:
    """Return the federation that a Trainer runs, for a callback that requires a federation.

    Args:
        trainer: The Trainer.
        name: Name of the callback, for the message.
        reason: End of the message: why a plain Trainer is not sufficient, and what to do instead.

    Raises:
        InvalidValueError: If the Trainer is a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> require_federation(L.Trainer(barebones=True, accelerator="cpu"), "APFL", "it has no clients")
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidValueError: \
Expected a Trainer with `strategy="federated"` for `APFL`, but got a plain one: it has no clients.
    """
    federation = find_federation(trainer)
    if federation is None:
        raise InvalidValueError(
            f'Expected a Trainer with `strategy="federated"` for `{name}`, but got a plain one: {reason}.',
            argument="strategy",
        )
    return federation


def get_ranks(trainer: L.Trainer) -> Ranks:
    """Return the ranks of a Trainer's federation. A plain Trainer has a single rank.

    Example:
        >>> import lightning.pytorch as L
        >>> get_ranks(L.Trainer(barebones=True, accelerator="cpu")).num_ranks
        1
    """
    federation = find_federation(trainer)
    return federation.ranks if federation is not None else SINGLE_RANK


@runtime_checkable
class ClientEndListener(Protocol):
    """A callback that runs after each client's local training.

    The client's state is then in the module. `ClientStateReader` describes an exception.
    """

    def on_client_end(self, trainer: L.Trainer, pl_module: L.LightningModule, client_round: ClientRound) -> None:
        """Called after the local training and upload of each client, except clients whose upload was dropped."""


@runtime_checkable
class ClientStateReader(ClientEndListener, Protocol):
    """A `ClientEndListener` that reads the client's state only in some rounds.

    If no callback reads the state in a round, the state is not loaded into the module.
    """

    def needs_client_state(self, pl_module: L.LightningModule) -> bool:
        """Return whether this callback reads client states in the next round."""


@runtime_checkable
class RoundEndListener(Protocol):
    """A callback that runs at the end of each round. The server's state is then in the module."""

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Called after the aggregation."""


@runtime_checkable
class FederatedModule(Protocol):
    """A module that sets ``lightning_fcl_protocols = True``.

    This attribute declares that the module uses the names in the protocols below with the meanings documented here. The
    tasks of the library set this attribute.
    """

    lightning_fcl_protocols: ClassVar[bool]


@runtime_checkable
class HasSampleLoss(FederatedModule, Protocol):
    """A module that defines the loss of each sample, separately from its training step."""

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, shape (batch,)."""


@runtime_checkable
class Vectorizable(HasSampleLoss, Protocol):
    """A module whose training loss is the mean of its `sample_loss`, so that clients can train vectorized."""

    def sequential_reason(self) -> Obstacle | None:
        """Return the obstacle to vectorized training that the module reports, or None."""

    def update_train_loss(self, total: Tensor, samples: int) -> None:
        """Add the total loss of some samples to the training loss of the epoch."""


@runtime_checkable
class HasFeatures(FederatedModule, Protocol):
    """A module that returns the features from which it computes its output."""

    @property
    def features(self) -> int:
        """Number of features."""

    def embed(self, x: Tensor) -> Tensor:
        """Return the features, shape (batch, features)."""


@runtime_checkable
class HasLogitMask(FederatedModule, Protocol):
    """A module that classifies each sample among a subset of the classes."""

    def mask_logits(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the logits with -inf for classes outside the subset. Same shape as ``output``."""


@runtime_checkable
class HasNumClasses(FederatedModule, Protocol):
    """A module that defines the number of classes."""

    num_classes: int


@runtime_checkable
class HasMetrics(FederatedModule, Protocol):
    """A module that defines the metrics of its predictions, in place of accuracy."""

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Return new metrics of ``(predictions, targets)`` by name. The plots of reports show the first metric."""


@runtime_checkable
class HasLocalModels(FederatedModule, Protocol):
    """A module that defines whether a model with a client's state can make predictions.

    For example, a ridge regression cannot make predictions with a client's state that contains only the sums of
    statistics.
    """

    is_adapting: bool
    """Whether the module cannot be tested in the current round."""

    @property
    def client_state_predicts(self) -> bool:
        """Whether a model with a client's state can make predictions in the current round."""


@runtime_checkable
class HasAggregationHook(FederatedModule, Protocol):
    """A module with a function that is called after the aggregation."""

    def on_after_aggregation(self) -> None:
        """Change the aggregated server state in the module, for example compute a solution in closed form."""


@runtime_checkable
class HasFingerprint(FederatedModule, Protocol):
    """A module with arguments that a checkpoint must match to be resumed."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the arguments as plain values."""
