"""Regression: any network that maps a batch to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, MetricCollection, R2Score

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import at_least
from lightning_fcl.federation.optimizer_state import OptimizerFactory
from lightning_fcl.tasks.task import NetworkTask


class Regressor(NetworkTask):
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
        >>> import torch
        >>> task = Regressor(nn.Linear(4, 2), outputs=2)
        >>> task.sample_loss(torch.zeros(3, 2), torch.tensor([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]]))
        tensor([1., 2., 0.])
    """

    def __init__(self, model: nn.Module, outputs: int = 1, optimizer: OptimizerFactory | None = None) -> None:
        super().__init__(model, optimizer)
        at_least(1, outputs=outputs)
        self.outputs = outputs
        self.val_measures = MetricCollection(dict(self.measures()))
        self.test_measures = MetricCollection(dict(self.measures()))

    def measures(self) -> Mapping[str, Metric]:
        """Mean squared error and coefficient of determination; of several outputs their means."""
        return {"MSE": MeanSquaredError(), "R2": R2Score()}

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Squared error of every sample, mean over its outputs, shape (batch,)."""
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

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        measures = self.val_measures if stage == "val" else self.test_measures
        x, y = batch
        output = self(x)
        self.log(f"{stage}/loss", self.sample_loss(output, y).mean(), batch_size=len(y))
        measures.update(output, self._wanted(output, y))
        self.log_dict({f"{stage}/{name}": one for name, one in measures.items()}, batch_size=len(y))
