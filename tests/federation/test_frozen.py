"""Tests that frozen parameters are transmitted only if training changes them."""

import copy

import pytest
import torch
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.edge.report import device_report
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.server import FederatedServer


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        # The base has 112 bytes. The adapters have 48 and 32 bytes.
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def one_round(server, module, change=lambda row, name: 0.0):
    server.start_round(module)
    server.download(["a", "b"])
    start = {name: value.detach().clone() for name, value in module.state_dict().items()}
    states = {name: torch.stack([value + change(row, name) for row in range(2)]) for name, value in start.items()}
    server.upload([ClientRound("a", 0, num_samples=1), ClientRound("b", 0, num_samples=2)], states)
    module.load_state_dict(server.aggregate())
    return server.record


@pytest.mark.parametrize("size", [1, 3])
def test_frozen_base_is_neither_transmitted_nor_averaged(fit, make_stream, size):
    torch.manual_seed(0)
    task, metrics = Classifier(LoRA(), 4), ContinualMetrics()
    base = copy.deepcopy(task.model.base.state_dict())
    trainer = fit(task, make_stream(partition="dirichlet"), [metrics], max_vectorized_clients=size)
    for entry in metrics.record["rounds"]:
        assert {*entry["upload_bytes"].values()} == {*entry["download_bytes"].values()} == {48 + 32}
    assert all(torch.equal(value, base[name]) for name, value in task.model.base.state_dict().items())
    assert trainer.strategy.server.record.accepted
    sync = device_report(task, (6,))["synchronisation"]
    assert sync["simulated_upload_bytes"] == sync["simulated_download_bytes"] == 48 + 32


def test_frozen_parameters_are_found_in_each_round():
    server, module = FederatedServer(ClientStore()), LoRA()
    server.start_fit(module)
    assert one_round(server, module).upload_bytes == {"a": 80, "b": 80}
    module.base.requires_grad_(True)
    record = one_round(server, module, lambda row, name: row + 1.0)
    assert record.upload_bytes == record.download_bytes == {"a": 80 + 112, "b": 80 + 112}
    module.base.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    record = one_round(server, module)
    assert record.upload_bytes == {"a": 80, "b": 80}
    # Clients download the base again, because it has changed since the start of the fit.
    assert record.download_bytes == {"a": 80 + 112, "b": 80 + 112}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_frozen_parameter_changed_by_training_is_transmitted():
    server, module = FederatedServer(ClientStore()), LoRA()
    server.start_fit(module)
    before = module.base.weight.clone()
    record = one_round(server, module, lambda row, name: 3.0 * (row == 1 and name == "base.weight"))
    assert record.upload_bytes == {"a": 80, "b": 80 + 96}
    # Client "b" has two of the three samples, so the mean of the changes 0 and 3 is 2.
    assert torch.allclose(module.base.weight, before + 2)
    goes_on = FederatedServer(ClientStore())
    goes_on.load_state_dict(copy.deepcopy(server.state_dict()))
    record = one_round(server, module)
    goes_on.start_fit(module)
    other = one_round(goes_on, module)
    assert record.download_bytes == other.download_bytes == {"a": 80 + 96, "b": 80 + 96}
