"""The base class of methods whose server trains a generator of samples, and functions that train a generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.methods.context import Server
from lightning_fcl.methods.functional import evaluation_mode, to_input
from lightning_fcl.methods.method import Method, first_sample
from lightning_fcl.models.generator import Generator, batchnorm_layers


class GenerativeMethod(Method):
    """Base class of methods whose server trains a generator of old samples, without client data.

    The samples are images or vectors. The network has batch normalization.
    """

    @property
    def is_generating(self) -> bool:
        """Whether the arguments of the method require generated samples."""
        raise NotImplementedError

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.is_generating:
            return
        name = type(self).__name__
        federation = require_federation(trainer, name, self.needs.federation_reason)
        sample = first_sample(federation, name)
        self._size, self._classes = tuple(sample.shape), federation.stream.num_classes
        if not (sample.dim() == 3 or (sample.dim() == 1 and sample.is_floating_point())):
            raise InvalidValueError(
                "Expected images, shape (channels, height, width), or vectors of floating-point numbers, shape "
                f"(features,), for `{name}`, but got samples of shape {self._size} and dtype {sample.dtype}.",
                hint="Use a dataset of images or feature vectors, or another method.",
                argument="x",
                value=self._size,
            )
        batchnorm_layers(pl_module)

    def make_generator(self, module: L.LightningModule, noise_dim: int, width: int) -> Generator:
        """Return a new generator of samples, with the device and the dtype of a module."""
        return Generator(self._size, noise_dim, width).to(to_input(module, torch.empty(0)))


@contextmanager
def generator_training(server: Server) -> Iterator[None]:
    """Temporarily set the server's module to evaluation mode, enable gradients and seed the random numbers."""
    with isolate_rng(), evaluation_mode(server.module), torch.enable_grad():
        torch.manual_seed(server.generator.initial_seed())
        yield


def take_step(loss: Tensor, *optimizers: Optimizer) -> None:
    """Take a step of each optimizer along the gradient of a loss. All other parameters get no gradient."""
    leaves = [leaf for optimizer in optimizers for group in optimizer.param_groups for leaf in group["params"]]
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        leaf.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
