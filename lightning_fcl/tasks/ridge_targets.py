"""What a readout that is solved for should say, and how good it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.errors import at_least


class OneHot:
    """Classes: 1 for a sample's own and 0, or -1, for the others; the largest output wins."""

    quantity = "accuracy"

    def __init__(self, num_classes: int, signed: bool = False) -> None:
        at_least(1, num_classes=num_classes)
        self.outputs = num_classes
        self.signed = signed

    def encode(self, y: Tensor) -> Tensor:
        """What the readout should say of samples: (batch, outputs), or (batch, time, outputs) for every step."""
        if y.is_floating_point():
            raise ValueError(
                f"Expected whole numbers as labels but got {y.dtype}. `ReservoirRegressor` takes such targets."
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.outputs:
            wrong = int(y[(y < 0) | (y >= self.outputs)][0])
            raise ValueError(
                f"Expected labels between 0 and {self.outputs - 1} but got {wrong}. Set `num_classes` to the data's "
                "number of classes."
            )
        targets = F.one_hot(y.long(), self.outputs).double()
        return targets * 2 - 1 if self.signed else targets

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """How good each of several readouts is, the more the better: (..., readouts, outputs), (..., outputs)."""
        right = outputs.argmax(dim=-1) == wanted.argmax(dim=-1)[..., None]
        return right.double().flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MulticlassAccuracy(self.outputs, average="micro")

    def decode(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """What the metric compares: of outputs and targets, both of shape (..., outputs)."""
        return outputs.argmax(dim=-1).flatten(), wanted.argmax(dim=-1).flatten()


class Numbers:
    """Numbers, by their squared error."""

    quantity = "error"

    def __init__(self, outputs: int) -> None:
        at_least(1, outputs=outputs)
        self.outputs = outputs

    def encode(self, y: Tensor) -> Tensor:
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

    def decode(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.float().flatten(), wanted.float().flatten()


ReadoutTargets = OneHot | Numbers
