"""A LightningModule that combines a network and a loss."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn


class Steps(L.LightningModule):
    """A LightningModule that trains a network with a given loss."""

    def __init__(self, network: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]):
        super().__init__()
        self.network, self.loss = network, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.network, batch)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
