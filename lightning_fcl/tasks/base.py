"""What tasks share: each tells what it was made with, and is made again from its checkpoints; networks that learn."""

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
from lightning_fcl.io.checkpoint import read_checkpoint
from lightning_fcl.models.readout import EmbedsSamples
from lightning_fcl.models.serialization import Serializable, build_from_config, validate_arguments


class Task(Serializable, L.LightningModule):
    """A LightningModule whose hyperparameters say what it was made with, as plain data."""

    lightning_fcl_protocols: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(self.init_config["init_args"])

    @classmethod
    def load_from_checkpoint(  # type: ignore[override] # Lightning hides a class method behind a descriptor
        cls, checkpoint_path: str | Path, map_location: Any = None, strict: bool | None = None, **arguments: object
    ) -> Self:
        """A task with the weights of a checkpoint, a file or ``https://host/name.ckpt#sha256=...``.

        Networks of `lightning_fcl.models` and optimizers of `torch.optim` are made again from the hyperparameters, each
        checked before it is called; anything else is handed in as one of ``arguments``, such as ``model=MyNetwork()``.
        """
        load_file = partial(torch.load, map_location=map_location, weights_only=True)
        checkpoint = read_checkpoint(load_file, checkpoint_path)
        hparams = checkpoint.get("hyper_parameters", {})
        if not isinstance(hparams, Mapping):
            raise InvalidValueError(
                f"Expected the hyperparameters of {checkpoint_path} to be a mapping but got {hparams!r}.",
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
        """Log how good a batch's predictions are."""
        raise NotImplementedError


class _EpochLoss:
    """The loss of an epoch's samples, over all clients: attributes of the task itself begin anew with each."""

    def __init__(self) -> None:
        self.total, self.samples = torch.zeros(()), 0


class NetworkTask(Task):
    """A network that is trained by the mean of its samples' losses.

    The loss of each sample is a method of its own, so that a client group can be vectorized.
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
            if type(error) is not RuntimeError:  # memory that has run out, or a network without `forward`
                raise
            raise InvalidValueError(
                f"Expected `model` to take samples of the data, of shape {tuple(x.shape[1:])}, but "
                f"{type(self.model).__name__} gave: {error}.",
                hint="Fit its arguments to the data; what cannot be vectorised trains with `max_vectorized_clients=1`.",
            ) from error
        return output

    def to_network(self) -> nn.Module:
        """A plain network that predicts as this task does now."""
        return copy.deepcopy(self.model)

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample, shape (batch,)."""
        raise NotImplementedError

    def sequential_reason(self) -> Obstacle | None:
        """Return an obstacle if the training step is not the mean of `sample_loss`."""
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
        """Add to the training loss of the epoch, logged at its end: logging costs as much as a small model's step."""
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
    """A network that tells its features; another one is refused."""
    if not (isinstance(model, EmbedsSamples) and isinstance(model.features, int)):
        raise InvalidValueError(
            f"Expected a `model` with `embed(x)` and `features`, their number, but got a `{type(model).__name__}`.",
            hint="Use a network of `lightning_fcl.models`, or define `embed` and `features`.",
            argument="model",
            value=type(model).__name__,
        )
    return model
