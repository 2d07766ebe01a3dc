"""Classification of sequences and regression from them, by the readout of a reservoir."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, R2Score
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.errors import one_of
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.readout import Features
from lightning_fcl.tasks.reservoir import ReservoirTask
from lightning_fcl.tasks.reservoir_trainer import Share
from lightning_fcl.tasks.task import one_hot


class ReservoirClassifier(ReservoirTask):
    """Classification of sequences: one-hot targets, the largest output wins. See `ReservoirTask` for what it does.

    Args:
        reservoir: The network whose states the readout sees.
        num_classes: Number of classes.
        beta: Regulariser of the readout; of several, the one that does best on the validation samples after each round.
        readout: What the readout sees: each step's state (``"steps"``), each sequence's ``"last"`` one, or their
            ``"mean"``.
        share: What a client sends: its ``"statistics"`` or its own solution, the ``"weights"``.
        targets: One-hot as ``"0/1"`` (the papers') or ``"-1/1"``.
        symmetric: Whether only one half of B is kept and sent.
        min_samples: Clients whose statistics are of fewer samples are warned of; None: as many as the state has units.

    Raises:
        ValueError: If an argument is out of range, or, in a step, a label is.

    Example:
        >>> task = ReservoirClassifier(EchoStateNetwork(3, units=20, seed=0), num_classes=2, readout="last")
        >>> task(torch.zeros(5, 10, 3)).shape
        torch.Size([5, 2])
    """

    quantity = "accuracy"

    def __init__(
        self,
        reservoir: EchoStateNetwork,
        num_classes: int,
        beta: float | list[float] = 1e-3,
        readout: Features = "steps",
        share: Share = "statistics",
        targets: Literal["0/1", "-1/1"] = "0/1",
        symmetric: bool = False,
        min_samples: int | None = None,
    ) -> None:
        super().__init__(reservoir, num_classes, beta, readout, share, symmetric, min_samples)
        one_of(("0/1", "-1/1"), targets=targets)
        self.num_classes = num_classes
        self.signed = targets == "-1/1"

    @property
    def gives(self) -> str:
        return "-1/1" if self.signed else "0/1"

    def metric(self) -> Metric:
        return MulticlassAccuracy(self.readout.out_features, average="micro")

    def targets(self, y: Tensor) -> Tensor:
        if y.is_floating_point():
            raise ValueError(
                f"Expected whole numbers as labels but got {y.dtype}. `ReservoirRegressor` takes such targets."
            )
        targets = one_hot(y, self.num_classes)
        return targets * 2 - 1 if self.signed else targets

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        right = outputs.argmax(dim=-1) == wanted.argmax(dim=-1)[..., None]
        return right.double().flatten(0, -2).sum(dim=0)

    def to_predictions(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.argmax(dim=-1).flatten(), wanted.argmax(dim=-1).flatten()


class ReservoirRegressor(ReservoirTask):
    """Regression from sequences: targets of shape (batch, outputs), or (batch, time, outputs) for every step.

    Args:
        reservoir: The network whose states the readout sees.
        outputs: Size of the target.
        beta: See `ReservoirClassifier`; and all else.

    Example:
        >>> task = ReservoirRegressor(EchoStateNetwork(1, units=20, seed=0), outputs=1)
        >>> task(torch.zeros(5, 10, 1)).shape
        torch.Size([5, 10, 1])
    """

    quantity = "error"

    def metric(self) -> Metric:
        return MeanSquaredError()

    def measures(self) -> Mapping[str, Metric]:
        """Mean squared error and coefficient of determination, by which `ContinualMetrics` measures."""
        return {"MSE": MeanSquaredError(), "R2": R2Score()}

    def targets(self, y: Tensor) -> Tensor:
        if y.dim() not in (2, 3) or y.shape[-1] != self.readout.out_features:
            raise ValueError(
                f"Expected targets of shape (batch, {self.readout.out_features}), or (batch, time, "
                f"{self.readout.out_features}), but got {tuple(y.shape)}. Set `outputs` to the target's size."
            )
        if not torch.isfinite(y).all():
            raise ValueError("Expected finite targets but got NaN or infinite values. Mend or drop these sequences.")
        return y.double()

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return -(outputs - wanted[..., None, :]).square().sum(dim=-1).flatten(0, -2).sum(dim=0)

    def to_predictions(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.float().flatten(), wanted.float().flatten()
