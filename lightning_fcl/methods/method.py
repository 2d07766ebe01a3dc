"""Method: a declaration that goes among a Trainer's callbacks."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import MissingValueError
from lightning_fcl.federation.protocols import FederationProtocol
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.driver import MethodDriver
from lightning_fcl.methods.dry_run import first_indices
from lightning_fcl.methods.experience import check_in_step


class Method(MethodBase, Callback):
    """A federated or continual learning method: what it adds to the loss, does to the gradient, mixes in and remembers.

    Subclasses override some of the functions of `MethodBase`, and hooks of Lightning only where they must: the
    functions run in a plain Trainer, in a federation, and for many clients side by side.

    Args:
        clients: Who uses the method. See `MethodBase`.

    Example:
        >>> class WeightDecay(Method):
        ...     def penalty(self, client, step):
        ...         return 0.01 * sum(value.square().sum() for value in step.params.values())
        >>> WeightDecay(clients=["client1"]).clients
        ['client1']
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if get_methods(trainer)[0] is self:
            get_driver(trainer).setup(trainer, pl_module, stage)
        if stage == "fit":
            self.prepare(trainer, pl_module)
            check_in_step(self, pl_module)

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before a fit: refuse what the method cannot work with, and look up what it needs."""


def get_driver(trainer: L.Trainer) -> MethodDriver:
    """The driver of a Trainer's methods; it is put behind the last of them if there is none."""
    callbacks = get_callbacks(trainer)
    for callback in callbacks:
        if isinstance(callback, MethodDriver):
            return callback
    driver = MethodDriver(get_methods(trainer))
    position = 1 + max((i for i, callback in enumerate(callbacks) if isinstance(callback, Method)), default=-1)
    # A new list: Lightning may be going through the old one, and would call the method at hand once more.
    trainer.callbacks = [*callbacks[:position], driver, *callbacks[position:]]  # type: ignore[attr-defined]
    return driver


def sample_shape(federation: FederationProtocol, name: str) -> tuple[int, ...]:
    """The shape of a sample of a federation's stream, for a method that makes some."""
    stream = federation.stream
    if (rows := first_indices(stream)) is None:
        raise MissingValueError(
            f"Expected samples beside the server for `{name}`, which tell it their shape, but there are none, as in a "
            "deployment.",
            hint=f"Simulate the federation, or leave `{name}` out.",
        )
    with isolate_rng():  # a data set's own code may draw
        return tuple(stream.get_samples(rows[:1])[0].shape[1:])


def class_mask(num_classes: int, classes: Sequence[int]) -> Tensor:
    """Which of so many classes are among some, shape (number,); longer where these ask for it."""
    return add_seen_classes(torch.zeros(num_classes, dtype=torch.bool), torch.tensor(classes, dtype=torch.long))


def add_seen_classes(seen_mask: Tensor, labels: Tensor) -> Tensor:
    """A mask of classes, shape (classes,), with those of some labels; longer where they ask for it."""
    size = max(len(seen_mask), int(labels.max()) + 1 if len(labels) else 0)
    extended_mask = pad_classes(seen_mask, size).clone()
    extended_mask[labels] = True
    return extended_mask


def pad_classes(values: Tensor, size: int) -> Tensor:
    """Values of classes, with zeros for those that a larger output has."""
    return F.pad(values, (0, size - len(values)))


def match_output(values: Tensor, output: Tensor) -> Tensor:
    """Values of classes, as many as an output has classes, on its device."""
    return pad_classes(values.to(output.device), output.shape[-1])


def target_mask(target: Tensor, output: Tensor) -> Tensor:
    """Which class of an output, shape (batch, classes), is that of each target."""
    return torch.arange(output.shape[-1], device=output.device) == target[..., None]


def mask_other_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Logits of some classes; the others' are far below, and not -inf: what they add to a loss is finite."""
    return torch.where(classes, logits, -1e4)
