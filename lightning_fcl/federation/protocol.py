"""What the parts of a federation may know of each other: typed contracts, and nothing else.

The small protocols say what a module may offer beyond Lightning's `training_step`. Whoever asks says
``isinstance(module, StatesLoss)``, and none is required. A user's module may have such names with other meanings: those
of `Speaks` count if it says so. How clients train is in `lightning_fcl.federation.local_training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.optim import Optimizer
    from torchmetrics import Metric

    from lightning_fcl.data.stream import FederatedStream
    from lightning_fcl.federation.aggregation import State
    from lightning_fcl.federation.obstacles import Obstacle
    from lightning_fcl.federation.schedule import Participation
    from lightning_fcl.federation.server import FederatedServer
    from lightning_fcl.federation.settings import FederationSettings


class RoundAtHand(Protocol):
    """A round, and the client that trains in it now; None where several do side by side."""

    number: int

    @property
    def client_round(self) -> ClientRound | None: ...
    @property
    def local_epoch(self) -> int: ...
    @property
    def last_batch(self) -> bool: ...


class RunsFederation(Protocol):
    """What methods, tasks and callbacks know of a fit: see `lightning_fcl.simulation.federation.Federation`."""

    server: FederatedServer
    participation: Participation
    optimizers: list[Optimizer]
    shows_client: bool
    settings: FederationSettings
    ranks: Ranks

    @property
    def module(self) -> L.LightningModule: ...
    @property
    def stream(self) -> FederatedStream: ...
    @property
    def seed(self) -> int: ...
    @property
    def round(self) -> RoundAtHand: ...
    @property
    def batches(self) -> int: ...
    @property
    def scheduled(self) -> bool: ...
    def hosts(self, client: str) -> bool: ...
    def client_rounds(self, round: int) -> Sequence[ClientRound]: ...
    def ending_clients(self, round: int) -> Sequence[ClientRound]: ...
    def client_state(self, client: str, server: State | None = None) -> State: ...


def federation_of(trainer: L.Trainer) -> RunsFederation | None:
    """The federation that a Trainer runs; None for a plain Trainer.

    Example:
        >>> import lightning.pytorch as L
        >>> federation_of(L.Trainer(barebones=True, accelerator="cpu")) is None
        True
    """
    federation: RunsFederation | None = getattr(trainer.strategy, "federation", None)
    return federation


def need_federation(trainer: L.Trainer, name: str, why: str) -> RunsFederation:
    """The federation that a Trainer runs, for a callback that needs one.

    Args:
        trainer: The Trainer.
        name: The callback's name, for the message.
        why: What a plain Trainer lacks, or what to do in one.

    Example:
        >>> import lightning.pytorch as L
        >>> need_federation(L.Trainer(barebones=True, accelerator="cpu"), "APFL", "it has no clients")
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidValueError: \
Expected a Trainer with `strategy="federated"` for `APFL` but got a plain one: it has no clients.
    """
    federation = federation_of(trainer)
    if federation is None:
        raise InvalidValueError(
            f'Expected a Trainer with `strategy="federated"` for `{name}` but got a plain one: {why}.',
            argument="strategy",
        )
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
class LooksAtClients(ListensToClients, Protocol):
    """A `ListensToClients` that does not always look at the client's state: where nobody does, it is not loaded."""

    def looks_at_clients(self, pl_module: L.LightningModule) -> bool:
        """Whether it does in the round that begins."""


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

    def why_not_vectorized(self) -> Obstacle | None:
        """Return the obstacle to vectorized training that the module knows of, or None."""

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
