"""The base class `Method`, which is a Lightning callback, and helper functions for masks of classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Base class of federated and continual learning methods, which are Lightning callbacks.

    A subclass overrides some hooks of `MethodBase`, for example `penalty`, `project_gradient` or `replay_samples`. In a
    federation, all hooks work in sequential training. Most hooks also work in vectorized training of several clients,
    and in a plain Trainer. Override Lightning's own hooks only if no hook of `MethodBase` is sufficient.

    Args:
        clients: The clients that use the method. See `MethodBase`.

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
        """Check that the method supports the Trainer and the module, and store values that the fit needs.

        Called before a fit.

        Raises:
            ValueError: If the method does not support the Trainer or the module.
        """


def describe_methods(callbacks: Iterable[Callback]) -> str:
    """Return the names of the methods among some callbacks.

    Example:
        >>> describe_methods([])
        'none (fine-tuning)'
    """
    return ", ".join(type(one).__name__ for one in callbacks if isinstance(one, Method)) or "none (fine-tuning)"


def get_driver(trainer: L.Trainer) -> MethodDriver:
    """Return the driver of a Trainer's methods. If the Trainer has no driver, insert one after the last method."""
    callbacks = get_callbacks(trainer)
    for callback in callbacks:
        if isinstance(callback, MethodDriver):
            return callback
    driver = MethodDriver(get_methods(trainer))
    position = 1 + max((i for i, callback in enumerate(callbacks) if isinstance(callback, Method)), default=-1)
    # Assign a new list: Lightning may be iterating over the old list, and would call the current method twice.
    trainer.callbacks = [*callbacks[:position], driver, *callbacks[position:]]  # type: ignore[attr-defined]
    return driver


def first_sample(federation: FederationProtocol, name: str) -> Tensor:
    """Return one training sample of a federation's stream, without the batch dimension.

    Args:
        federation: The federation.
        name: Name of the method that needs the sample, for the error message.

    Raises:
        MissingValueError: If the stream has no samples, as on the server of a deployment.
    """
    stream = federation.stream
    if (rows := first_indices(stream)) is None:
        raise MissingValueError(
            f"Expected the stream on the server to have training samples, which define the sample shape for `{name}`, "
            "but the stream has no training samples, as in a deployment.",
            hint=f"Simulate the federation, or do not use `{name}`.",
        )
    # Reading a sample may draw random numbers in the dataset's own code.
    with isolate_rng():
        sample: Tensor = stream.get_samples(rows[:1])[0][0]
    return sample


def sample_shape(federation: FederationProtocol, name: str) -> tuple[int, ...]:
    """Return the shape of one sample of a federation's stream, without the batch dimension. See `first_sample`."""
    return tuple(first_sample(federation, name).shape)


def class_mask(num_classes: int, classes: Sequence[int]) -> Tensor:
    """Return a Boolean mask of classes, shape (num_classes,). If a class is ``num_classes`` or more, extend the mask.

    Args:
        num_classes: Minimum length of the mask.
        classes: The classes at which the mask is True.
    """
    return add_seen_classes(torch.zeros(num_classes, dtype=torch.bool), torch.tensor(classes, dtype=torch.long))


def add_seen_classes(seen_mask: Tensor, labels: Tensor) -> Tensor:
    """Return a copy of a mask of classes, shape (classes,), that is also True at the labels.

    If a label is greater than the last index of the mask, the copy is longer than the mask.
    """
    size = max(len(seen_mask), int(labels.max()) + 1 if len(labels) else 0)
    extended_mask = pad_classes(seen_mask, size).clone()
    extended_mask[labels] = True
    return extended_mask


def pad_classes(values: Tensor, size: int) -> Tensor:
    """Return per-class values, shape (classes,), padded with zeros to the length ``size``."""
    return F.pad(values, (0, size - len(values)))


def match_output(values: Tensor, output: Tensor) -> Tensor:
    """Return per-class values on the device of an output, padded with zeros to the output's number of classes."""
    return pad_classes(values.to(output.device), output.shape[-1])


def target_mask(target: Tensor, output: Tensor) -> Tensor:
    """Return a Boolean mask of shape (batch, classes) that is True at the target class of each sample."""
    return torch.arange(output.shape[-1], device=output.device) == target[..., None]


def mask_other_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Return logits in which every class whose entry of the mask ``classes`` is False has the value -1e4.

    The value is not -inf, so that a loss of these logits stays finite.
    """
    return torch.where(classes, logits, -1e4)
