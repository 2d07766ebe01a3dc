"""Tests of FedRep: clients train the head first, then the body. The frozen part stays bitwise unchanged."""

import copy

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl import Classifier
from lightning_fcl.callbacks import FedRep, FedViT
from lightning_fcl.errors import InvalidValueError

OWN = {"model.head.*": "local"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.body(x))


def make_task(optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    return Classifier(Net(), 4, lambda params: optimizer(params, lr=0.05))


class Stages(Callback):
    """Records the client round, the local epoch and the changed parts of each step, except for a client's last step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.now = (trainer.strategy.current_client_round, trainer.strategy.current_round.local_epoch)
        self.before = copy.deepcopy(module.state_dict())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        # After the last batch of a client, the module no longer contains the client's state.
        if not trainer.strategy.current_round.last_batch:
            after = module.state_dict().items()
            changed = {name.split(".")[1] for name, value in after if not torch.equal(value, self.before[name])}
            self.steps.append((*self.now, changed))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_fedrep_stages_keep_frozen_part_bitwise_unchanged(fit, make_stream, optimizer):
    task, stages = make_task(optimizer), Stages()
    fit(task, make_stream(drop_last=True), [FedRep(2, 3), stages], max_epochs=2, reductions=OWN)
    assert {epoch for _, epoch, _ in stages.steps} == {0, 1, 2, 3, 4}
    for _, epoch, changed in stages.steps:
        assert changed == ({"head"} if epoch < 2 else {"body"})
    assert all(p.requires_grad for p in task.parameters())


def tied(net):
    net.body.append(nn.Linear(5, 5)).append(nn.Linear(5, 5))
    net.body[4].weight = net.body[3].weight


def without_parameters(net):
    net.body[1] = nn.BatchNorm1d(5, affine=False)


def frozen(net):
    net.body[1].eval().requires_grad_(False)


@pytest.mark.parametrize("change", [lambda net: None, tied, without_parameters, frozen])
def test_fedrep_equals_hand_written_loop(fit, make_stream, change):
    stream, task = (
        make_stream(num_clients=1, num_experiences=1, shuffle=False, batch_size=200),
        make_task(torch.optim.SGD),
    )
    change(task.model)
    net, learn = copy.deepcopy(task.model), [p.requires_grad for p in task.parameters()]
    modes = [layer.training for layer in net.modules()]
    fit(task, stream, [FedRep(1, 2)], max_epochs=1, reductions=OWN)
    (x, y), optimizer = stream.get_samples(stream.plan.train[0]["0"]), torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(3):
        for layer, mode in zip(net.modules(), modes, strict=True):
            layer.training = mode
        if epoch < 1:
            net.body.eval()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        for p in (net.body if epoch < 1 else net.head).parameters():
            p.grad = None
        optimizer.step()
    start = make_task().model
    change(start)
    for name, value in net.body.state_dict().items():
        torch.testing.assert_close(task.state_dict()[f"model.body.{name}"], value)
        # Batch normalization cancels the bias of layer 0, so training may leave this bias unchanged.
        if name != "0.bias":
            still = change is frozen and name.startswith("1.")
            assert torch.equal(value, start.body.state_dict()[name]) == still
    assert [layer.training for layer in task.model.modules()] == modes
    assert [p.requires_grad for p in task.parameters()] == learn


def test_fedrep_client_without_method_trains_head_and_body(fit, make_stream):
    stages = Stages()
    stream, method = make_stream(drop_last=True), FedRep(1, 1, clients=["0"])
    fit(make_task(), stream, [method, stages], max_epochs=1, reductions=OWN, local_epochs=2)
    for part, epoch, changed in stages.steps:
        staged = {"head"} if epoch < 1 else {"body"}
        assert changed == (staged if part.client_id == "0" else {"head", "body"})


def test_fedrep_failed_fit_restores_requires_grad(fit, make_stream, quiet):
    task = make_task()
    task.model.body[0].bias.requires_grad_(False)
    task.model.head.bias.requires_grad_(False)
    learn = [p.requires_grad for p in task.parameters()]
    for method in (FedRep(), FedRep(head_pattern="model.tail.*"), FedViT()):
        with raises(InvalidValueError, "strategy"):
            L.Trainer(max_epochs=1, callbacks=[method], **quiet).fit(task, datamodule=make_stream(num_clients=1))
        with pytest.raises(ValueError, match="Expected"):
            fit(task, make_stream(), [method])
        assert [p.requires_grad for p in task.parameters()] == learn


def test_fedrep_invalid_settings_raise(fit, make_stream):
    with raises(InvalidValueError, "reductions"):
        fit(make_task(), make_stream(), [FedRep()])
    with raises(InvalidValueError, "head_pattern"):
        fit(make_task(), make_stream(), [FedRep(head_pattern="model.tail.*")])
