"""Base classes of tasks: checkpoints with all arguments, and networks that are trained by gradient descent."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import check_state, load_state_tensors
from lightning_fcl.federation.obstacles import Obstacle, Reason
from lightning_fcl.federation.protocols import get_ranks
from lightning_fcl.federation.server_optimizer import OptimizerFactory, make_optimizer
from lightning_fcl.io.checkpoint import check_weights_only, read_checkpoint
from lightning_fcl.models.readout import EmbedsSamples
from lightning_fcl.models.serialization import Serializable, build_from_config, validate_arguments


class Task(Serializable, L.LightningModule):
    """A LightningModule that stores its constructor arguments as hyperparameters that consist of plain data."""

    lightning_fcl_protocols: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(self.init_config["init_args"])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override] # Lightning hides a class method behind a descriptor
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: object,
    ) -> Self:
        """Return a task with the weights of a checkpoint.

        Networks of `lightning_fcl.models` and optimizers of `torch.optim` are created from the hyperparameters, and
        their arguments are checked first. Pass other objects as ``arguments``, such as ``model=MyNetwork()``.

        Args:
            checkpoint_path: A file, or ``https://host/name.ckpt#sha256=...``.
            map_location: Device of the tensors, as in `torch.load`.
            strict: Whether the state must match the task. Default: the task's ``strict_loading``.
            weights_only: None or True. A checkpoint is always read without running code.
            arguments: Arguments of the task in place of the hyperparameters with the same names.

        Raises:
            ValueError: If a hyperparameter or, with ``strict``, the state does not match the task, or if
                ``weights_only`` is False.
        """
        check_weights_only(weights_only)
        load_file = partial(torch.load, map_location=map_location, weights_only=True)
        checkpoint = read_checkpoint(load_file, checkpoint_path)
        hparams = checkpoint.get("hyper_parameters", {})
        if not isinstance(hparams, Mapping):
            raise InvalidValueError(
                f"Expected the hyperparameters of {checkpoint_path} to be a mapping, but got {hparams!r}.",
                argument="hparams",
                value=hparams,
            )
        hparam_values = {key: build_from_config(value, key) for key, value in hparams.items() if key not in arguments}
        task = cls(**validate_arguments(cls, {**hparam_values, **arguments}, cls.__name__))
        task.on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        if strict if strict is not None else task.strict_loading:
            check_state(task, state)
            load_state_tensors(task, state)
        else:
            task.load_state_dict(state, strict=False)
        return task

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        """Compute the loss and the metrics of a batch, and log them under ``stage``."""
        raise NotImplementedError


class _EpochLoss:
    """The sum of the training losses and the number of samples in an epoch, over all clients of this process.

    The sums are in a separate object because attributes of the task are reset for each client.
    """

    def __init__(self) -> None:
        self.total, self.samples = torch.zeros(()), 0


class NetworkTask(Task):
    """A task whose network is trained on the mean of the samples' losses.

    A separate method, `sample_loss`, returns the loss of each sample, so that one vectorized step can train several
    clients.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory | None) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self._loss = _EpochLoss()

    def forward(self, x: Tensor) -> Tensor:
        try:
            output: Tensor = self.model(x)
        except RuntimeError as error:
            # Subclasses of RuntimeError have other causes, such as a lack of memory or a network without `forward`.
            if type(error) is not RuntimeError:
                raise
            raise InvalidValueError(
                f"Expected `model` to take samples of the data, of shape {tuple(x.shape[1:])}, but "
                f"{type(self.model).__name__} raised: {error}.",
                hint="Change the arguments of `model` to match the data. If `model` cannot be vectorized, set "
                "`max_vectorized_clients=1`.",
            ) from error
        return output

    def to_network(self) -> nn.Module:
        """Return a plain network that makes the same predictions as the task with its current weights."""
        return copy.deepcopy(self.model)

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every sample, shape (batch,)."""
        raise NotImplementedError

    def sequential_reason(self) -> Obstacle | None:
        """Return an obstacle to vectorized training, or None if the training step is the mean of `sample_loss`."""
        name = type(self).__name__
        if type(self).training_step is not NetworkTask.training_step:
            return Obstacle(Reason.OVERRIDES, (f"`{name}` overrides `training_step`",))
        return None if self.automatic_optimization else Obstacle(Reason.MANUAL, (name,))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.sample_loss(self(x), y).mean()
        self.update_train_loss(loss.detach() * len(y), len(y))
        return loss

    def update_train_loss(self, total: Tensor, samples: int) -> None:
        """Add the total loss of some samples to the training loss of the epoch, which is logged at the epoch's end.

        Logging every step would take as long as the training step of a small model.
        """
        self._loss.total = self._loss.total + total
        self._loss.samples += samples

    def on_train_epoch_end(self) -> None:
        of_ranks = get_ranks(self.trainer).all_gather_object((self._loss.total, self._loss.samples))
        total, samples = (sum(column[1:], column[0]) for column in zip(*of_ranks, strict=True))
        if samples:
            self.log("train/loss", total / samples, batch_size=1)
        self._loss = _EpochLoss()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        output: Tensor = self(batch[0] if isinstance(batch, list | tuple) else batch)
        return output

    def configure_optimizers(self) -> Optimizer:
        if self.optimizer is None:
            return torch.optim.SGD(self.parameters(), lr=0.01)
        return make_optimizer(self.optimizer, self.parameters())


def require_embedding_body(model: nn.Module) -> EmbedsSamples:
    """Return the network if it computes features.

    Raises:
        ValueError: If the network has no ``embed``, or no integer ``features``.
    """
    if not (isinstance(model, EmbedsSamples) and isinstance(model.features, int)):
        raise InvalidValueError(
            f"Expected a `model` with `embed(x)` and an integer `features`, but got a `{type(model).__name__}`.",
            hint="Use a network of `lightning_fcl.models`, or define `embed` and `features`.",
            argument="model",
            value=type(model).__name__,
        )
    return model
