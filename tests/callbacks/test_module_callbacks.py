"""Tests that callbacks which are submodules, as in anomalib, act on the batches of `ContinualMetrics`."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics.regression import MeanSquaredError

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import Stationary

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


class Scaling(nn.Module, Callback):
    """A submodule and callback that replaces the inputs of each batch by scaled inputs."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0] = batch[0] / 8

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        batch[0] = batch[0] / 8


class Error(nn.Module, Callback):
    """A submodule and callback that logs the mean squared error of the outputs of `test_step`."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.error.update(outputs, batch[1])

    def on_test_epoch_end(self, trainer, pl_module):
        self.log("squared_error", self.error)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.scaling, self.error = nn.Linear(3, 1), Scaling(), Error()

    def configure_callbacks(self):
        return [self.scaling, self.error]

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1][:, None])

    def test_step(self, batch, batch_idx):
        return self.net(batch[0])[:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.may(
    "Submodules that are callbacks, such as a pre-processor or an evaluator of anomalib",
    "The hooks of these submodules run on the training batches of each client and on batches of `ContinualMetrics`.",
)
def test_callbacks_within_module_metrics_equal_plain_test(fit, quiet):
    stream = FederatedStream.from_arrays(
        X, X.sum(axis=1), scenario=Stationary(2), partition=IID(2), batch_size=7, seed=0
    )
    metrics, module = ContinualMetrics(), Module()
    fit(module, stream, [metrics])
    (tested,) = L.Trainer(**quiet).test(module, datamodule=stream, verbose=False)
    with torch.no_grad():
        x, y = stream.get_samples(stream.plan.test)
        by_hand = F.mse_loss(module.net(x / 8)[:, 0], y).item()
    values = metrics.record["rounds"][-1]["values"]["server"]["squared_error"]
    assert list(values.values()) == pytest.approx([by_hand]) and tested["squared_error"] == pytest.approx(by_hand)
    assert metrics.record["measures"] == [{"name": "squared_error", "higher_is_better": False}]
    assert not module.error.error.update_called and not hasattr(module.error, "_log")
