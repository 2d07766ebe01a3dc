"""Tests that a module implements only the protocols that it declares. Attributes with the same names do not count."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import EWC, ContinualMetrics, FedProto, LogitAdjustment
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation import protocols
from lightning_fcl.federation.local_trainer import HasLocalTrainer
from lightning_fcl.tasks.classification import OutputsByTask
from lightning_fcl.zoo.publishing import ExportsNetwork

PROTOCOLS = [
    protocols.HasSampleLoss,
    protocols.Vectorizable,
    protocols.HasFeatures,
    protocols.HasLogitMask,
    protocols.HasNumClasses,
    protocols.HasMetrics,
    protocols.HasLocalModels,
    protocols.HasAggregationHook,
    protocols.HasFingerprint,
    HasLocalTrainer,
    OutputsByTask,
    ExportsNetwork,
]
NAMES = {name for kind in PROTOCOLS for name in [*vars(kind), *kind.__annotations__] if not name.startswith("_")}
NAMES -= {"lightning_fcl_protocols"}


class Others(L.LightningModule):
    """A user's module that has all names of the protocols with different meanings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(6, 4)
        for name in NAMES - {"sample_loss", "embed", "fingerprint", "adapting", "num_classes"}:
            setattr(self, name, name)
        self.reductions, self.adapting, self.num_classes = "sum", True, 1

    def sample_loss(self):
        raise AssertionError("unexpected call of a function with another meaning")

    fingerprint = embed = sample_loss

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(Others):
    def __init__(self):
        super().__init__()
        for name in [name for name in vars(self) if name in NAMES | {"reductions"}]:
            delattr(self, name)


def test_module_with_protocol_names_by_chance_trains_normally(fit, make_stream, tmp_path):
    assert {
        "fingerprint",
        "configure_local_trainer",
        "configure_metrics",
        "to_network",
        "embed",
        "outputs_by_task",
        "output_kind",
    } <= NAMES
    others, plain, metrics = Others(), Plain(), ContinualMetrics()
    assert not any(isinstance(others, kind) for kind in PROTOCOLS)
    saving = {"enable_checkpointing": True}
    fit(others, make_stream(), [metrics, ModelCheckpoint(tmp_path, "last")], trainer_args=saving, seed=0)
    fit(plain, make_stream(), seed=0)
    assert torch.equal(others.model.weight, plain.model.weight)
    assert "measures" not in metrics.record and len(metrics.record["rounds"]) == 2
    fit(Others(), make_stream(), ckpt_path=tmp_path / "last.ckpt", seed=0)


@pytest.mark.parametrize(
    ("method", "argument"),
    [(EWC, "sample_loss"), (FedProto, "embed"), (lambda: LogitAdjustment(prior="federation"), "num_classes")],
)
def test_method_with_undeclared_protocol_raises(fit, make_stream, method, argument):
    with raises(InvalidValueError, argument):
        fit(Others(), make_stream(), [method()])


def test_network_with_protocol_names_by_chance_trains_normally(fit, make_stream):
    class Network(nn.Linear):
        def __init__(self):
            super().__init__(6, 4)
            self.outputs_by_task, self.features, self.embed = {}, nn.Identity(), "text"

    task = Classifier(Network(), 4)
    fit(task, make_stream(), [ContinualMetrics()])
    with raises(InvalidValueError, "model"):
        fit(task, make_stream(), [FedProto()])
