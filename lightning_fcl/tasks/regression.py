"""Regression: any network that maps a batch to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanSquaredError, Metric, MetricCollection, R2Score

from lightning_fcl.federation.optimizer_state import OptimizerFactory, make_optimizer
from lightning_fcl.tasks.task import Task


class Regressor(Task):
    """A network trained by the mean squared error; it states its loss apart, so that cohorts can train it.

    `ContinualMetrics` measures it by ``measures()``, the mean squared error and the coefficient of determination. A
    subclass may state another `sample_loss`, or other measures.

    Args:
        model: Maps inputs of shape (batch, ...) to numbers of shape (batch, outputs).
        outputs: How many numbers a sample's target has.
        optimizer: Makes the clients' optimizer from the parameters; default: SGD with a learning rate of 0.01.

    Raises:
        ValueError: If `outputs` is below 1; in a step, if outputs or targets have another shape.

    Example:
        >>> task = Regressor(nn.Linear(4, 2), outputs=2)
        >>> task.sample_loss(torch.zeros(3, 2), torch.tensor([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]]))
        tensor([1., 2., 0.])
    """

    def __init__(self, model: nn.Module, outputs: int = 1, optimizer: OptimizerFactory | None = None) -> None:
        super().__init__()
        if outputs < 1:
            raise ValueError(f"Expected `outputs` to be at least 1 but got {outputs}.")
        self.model = model
        self.outputs = outputs
        self.optimizer = optimizer
        self._loss_sum, self._loss_samples = torch.zeros(()), 0
        self.val_measures = MetricCollection(dict(self.measures()))
        self.test_measures = MetricCollection(dict(self.measures()))

    def measures(self) -> Mapping[str, Metric]:
        """Mean squared error and coefficient of determination; of several outputs their means."""
        return {"MSE": MeanSquaredError(), "R2": R2Score()}

    def forward(self, x: Tensor) -> Tensor:
        """Numbers, shape (batch, outputs)."""
        numbers: Tensor = self.model(x)
        return numbers

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Squared error of every sample, mean over its outputs, shape (batch,).

        Raises:
            ValueError: If outputs or targets have another shape.
        """
        return F.mse_loss(output, self._wanted(output, y), reduction="none").mean(dim=1)

    def _wanted(self, output: Tensor, y: Tensor) -> Tensor:
        """Targets as the output has them, shape (batch, outputs); those of one output may have the shape (batch,)."""
        y = y[:, None] if y.dim() == 1 else y
        shape = (len(y), self.outputs)
        if output.shape != shape or y.shape != shape:
            raise ValueError(
                f"Expected outputs and targets of shape (batch, {self.outputs}) but got {tuple(output.shape)} and "
                f"{tuple(y.shape)}. Set `outputs` to the size of the target, and that of the network's last layer."
            )
        return y.to(output.dtype)

    def why_not_vectorized(self) -> str | None:
        """The reason why clients must train one at a time: a training step that is not the mean of `sample_loss`."""
        if type(self).training_step is not Regressor.training_step:
            return f"`{type(self).__name__}` overrides `training_step`"
        return None if self.automatic_optimization else f"`{type(self).__name__}` optimises by hand"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss of a batch."""
        x, y = batch
        loss = self.sample_loss(self(x), y).mean()
        self.count_loss(loss.detach() * len(y), len(y))
        return loss

    def count_loss(self, total: Tensor, samples: int) -> None:
        """Add to the training loss of the epoch, logged at its end."""
        self._loss_sum = self._loss_sum + total
        self._loss_samples += samples

    def on_train_epoch_end(self) -> None:
        """Log the mean training loss of the epoch (in a federation: of all clients' steps in the round)."""
        if self._loss_samples:
            self.log("train/loss", self._loss_sum / self._loss_samples, batch_size=1)
        self._loss_sum, self._loss_samples = torch.zeros(()), 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and measures."""
        self._evaluate(batch, "val", self.val_measures)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and measures."""
        self._evaluate(batch, "test", self.test_measures)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Numbers of a batch, shape (batch, outputs): of samples, or of samples and their targets."""
        numbers: Tensor = self(batch[0] if isinstance(batch, list | tuple) else batch)
        return numbers

    def _evaluate(self, batch: Any, stage: str, measures: MetricCollection) -> None:
        x, y = batch
        output = self(x)
        self.log(f"{stage}/loss", self.sample_loss(output, y).mean(), batch_size=len(y))
        measures.update(output, self._wanted(output, y))
        self.log_dict({f"{stage}/{name}": one for name, one in measures.items()}, batch_size=len(y))

    def configure_optimizers(self) -> Optimizer:
        """The optimizer that was given, or SGD with a learning rate of 0.01."""
        if self.optimizer is None:
            return torch.optim.SGD(self.parameters(), lr=0.01)
        return make_optimizer(self.optimizer, self.parameters())
