"""Ridge classification on a frozen network's features: a few sums instead of weights, and nothing to forget."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.models.readout import FeatureReadout
from lightning_fcl.models.ridge import RidgeReadout
from lightning_fcl.tasks.classification import Classifier
from lightning_fcl.tasks.task import one_hot, one_local_epoch


class RidgeClassifier(Classifier):
    """The summed readout of Bacciu et al. 2021 (IncFed) on a network's features, as in Kröger et al.'s setting.

    Clients add up ``A = Y S^T`` and ``B = S S^T`` of their samples' features, the server adds these up and solves:
    after each session the readout is that of ridge regression on all samples so far, in one pass and one
    synchronisation. `lightning_fcl.callbacks.BaseSession` trains the network and adds the base session's samples.

    Args:
        model: The network. Its ``embed(x)`` gives the features, shape (batch, ``features``).
        num_classes: Number of classes.
        beta: Regulariser, at least 0.
        symmetric: Whether only the upper triangle of B is kept and sent.

    Raises:
        ValueError: If the network has no such features.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> task = RidgeClassifier(DSICNet(), num_classes=10)
        >>> task(torch.zeros(2, 1, 64, 48)).shape, sum(v.nbytes for n, v in task.named_buffers() if n[-1] in "AB")
        (torch.Size([2, 10]), 32320)
    """

    gives: ClassVar[str] = "0/1"

    def __init__(self, model: nn.Module, num_classes: int, beta: float = 1.0, symmetric: bool = True) -> None:
        super().__init__(model, num_classes)
        self.automatic_optimization = False
        self.readout = RidgeReadout(self.features, num_classes, beta, symmetric)
        sums = dict.fromkeys(("readout.A", "readout.B", "readout.n"), "sum")
        self.reductions = {"*": "fixed", **sums, "readout.weight": "download"}

    def forward(self, x: Tensor) -> Tensor:
        """Outputs near 1 for the right class and near 0 for the others, shape (batch, num_classes)."""
        outputs: Tensor = self.readout(self.embed(x)).to(x.dtype)
        return outputs

    def network(self) -> FeatureReadout:
        network = FeatureReadout(copy.deepcopy(self._body), self.num_classes)
        network.weight.copy_(self.readout.weight)
        return network

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        self.add(x, y)
        self.optimizers().step()  # type: ignore[union-attr] # nothing moves: checkpoints count steps

    def on_train_start(self) -> None:
        one_local_epoch(self)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples, shape (batch, ...), and their labels to the sums."""
        self.readout.partial_fit(self.embed(x), one_hot(y, self.num_classes))

    def on_base_session(self, x: Tensor, y: Tensor) -> None:
        self.add(x, y)
        self.readout.solve()

    def on_after_aggregation(self) -> None:
        self.readout.solve()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)
