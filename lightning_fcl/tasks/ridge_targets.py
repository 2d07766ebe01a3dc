"""What a readout that is solved for should say, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, R2Score
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.errors import at_least
from lightning_fcl.tasks.task import one_hot


class ReadoutTargets(Protocol):
    """What a readout should say of samples, and how good it is."""

    outputs: int
    """How many numbers it says."""

    quantity: str
    """What is logged in evaluation."""

    def of(self, y: Tensor) -> Tensor:
        """What it should say: (batch, outputs), or (batch, time, outputs) for targets of every step."""

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """How good each of several readouts is, the more the better: (..., readouts, outputs), (..., outputs)."""

    def metric(self) -> Metric:
        """A new metric of the quantity."""

    def compared(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """What the metric compares: of outputs and targets, both of shape (..., outputs)."""


class OneHot:
    """Classes: 1 for a sample's own and 0, or -1, for the others; the largest output wins."""

    quantity = "accuracy"

    def __init__(self, num_classes: int, signed: bool = False) -> None:
        at_least(1, num_classes=num_classes)
        self.outputs = num_classes
        self.signed = signed

    def of(self, y: Tensor) -> Tensor:
        if y.is_floating_point():
            raise ValueError(
                f"Expected whole numbers as labels but got {y.dtype}. `ReservoirRegressor` takes such targets."
            )
        targets = one_hot(y, self.outputs)
        return targets * 2 - 1 if self.signed else targets

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        right = outputs.argmax(dim=-1) == wanted.argmax(dim=-1)[..., None]
        return right.double().flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MulticlassAccuracy(self.outputs, average="micro")

    def compared(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.argmax(dim=-1).flatten(), wanted.argmax(dim=-1).flatten()


class Numbers:
    """Numbers, by their squared error."""

    quantity = "error"

    def __init__(self, outputs: int) -> None:
        at_least(1, outputs=outputs)
        self.outputs = outputs

    def of(self, y: Tensor) -> Tensor:
        if y.dim() not in (2, 3) or y.shape[-1] != self.outputs:
            raise ValueError(
                f"Expected targets of shape (batch, {self.outputs}), or (batch, time, {self.outputs}), but got "
                f"{tuple(y.shape)}. Set `outputs` to the target's size."
            )
        if not torch.isfinite(y).all():
            raise ValueError("Expected finite targets but got NaN or infinite values. Mend or drop these sequences.")
        return y.double()

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return -(outputs - wanted[..., None, :]).square().sum(dim=-1).flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MeanSquaredError()

    def measures(self) -> Mapping[str, Metric]:
        return {"MSE": MeanSquaredError(), "R2": R2Score()}

    def compared(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.float().flatten(), wanted.float().flatten()
