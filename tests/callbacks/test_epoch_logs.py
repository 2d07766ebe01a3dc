"""Tests of values that a module logs in its training steps. The training uses one or several processes."""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from raising import raises
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_fcl import FederatedStrategy
from lightning_fcl.callbacks import FedProx
from lightning_fcl.callbacks.round_log import RoundLog
from lightning_fcl.errors import MissingValueError


class Chatty(L.LightningModule):
    """A module that logs numbers and metrics in its training step, with and without `sync_dist`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 4)
        # This metric stores all predictions.
        self.auroc = MulticlassAUROC(4)
        self.scores = MetricCollection({"f1": MulticlassF1Score(4), "accuracy": MulticlassAccuracy(4)})

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        loss = F.cross_entropy(output, batch[1])
        self.scores(output, batch[1])
        self.auroc.update(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("samples", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class Rounds(Callback):
    """Stores the logged metrics and the learning rate of each round."""

    def __init__(self):
        self.rounds, self.batches = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append((dict(trainer.callback_metrics), trainer.optimizers[0].param_groups[0]["lr"]))

    def state_dict(self):
        return {"rounds": [({name: float(v) for name, v in found.items()}, rate) for found, rate in self.rounds]}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


@pytest.mark.may(
    "Logging in `training_step` with several processes", "The value logged for a round covers all clients."
)
@pytest.mark.seconds
def test_round_log_values_independent_of_number_of_processes(fit, make_stream):
    found = []
    for number in (1, 2, 3):
        stream = make_stream(partition="dirichlet", num_clients=3, num_experiences=2, rounds_per_experience=3)
        seen, stop = Rounds(), EarlyStopping("loss", min_delta=0.2, patience=1, check_on_train_epoch_end=True)
        strategy = FederatedStrategy(start_method="fork", max_vectorized_clients=1, seed=0)
        module = Chatty()
        trainer = fit(module, stream, [FedProx(0.1), seen, stop], strategy, trainer_args={"devices": number})
        last = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "loss_step"}
        losses = [float(values["loss_epoch"]) for values, _ in seen.rounds]
        found.append((last, losses, [rate for _, rate in seen.rounds], "log" in vars(module)))
    assert set(found[0][0]) == {"loss", "loss_epoch", "most", "samples", "auroc", "f1", "accuracy"}
    for last, losses, rates, patched in found:
        assert last == pytest.approx(found[0][0], abs=1e-6) and losses == pytest.approx(found[0][1], abs=1e-6)
        assert rates == found[0][2] and not patched
    assert len(set(found[0][1])) > 1 and len(set(found[0][2])) > 1


def test_round_log_metric_without_attribute_raises():
    module = Chatty()
    logs = RoundLog(module, SimpleNamespace(num_ranks=2, rank=0))
    logs.start_batch(torch.zeros(2))
    module.log("auroc", module.auroc, on_step=False, on_epoch=True)
    with raises(MissingValueError, "loose"):
        module.log("loose", MulticlassAccuracy(4), on_step=False, on_epoch=True)
