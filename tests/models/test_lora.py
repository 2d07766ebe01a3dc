"""Tests of LoRA: unchanged outputs at the start, updates of low rank, and averages of the clients' matrices."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import MLP, LoRA, ViT


def make(make_task, train_a=True, rank=2):
    torch.manual_seed(0)
    return make_task(model=LoRA(MLP([6, 16, 4]), rank, head="3.*", train_a=train_a))


def full(state):
    """Return the first layer's weight plus the scaled product of the LoRA matrices."""
    return state["model.net.1.layer.weight"] + 0.5 * state["model.net.1.b.weight"] @ state["model.net.1.a.weight"]


class Uploads(Callback):
    """Records the number of samples and the state of each upload."""

    def __init__(self):
        self.states = []

    def on_client_end(self, trainer, pl_module, client_round):
        weight = len(trainer.datamodule.plan.train[client_round.round_idx][client_round.client_id])
        self.states.append((weight, {name: value.clone() for name, value in pl_module.state_dict().items()}))

    def mean(self, of):
        return sum(weight * of(state) for weight, state in self.states) / sum(weight for weight, _ in self.states)


@pytest.mark.parametrize("train_a", [True, False])
def test_lora_mean_of_products_is_exact_only_with_a_common_a(fit, make_stream, make_task, train_a):
    rules = {} if train_a else {"model.*.a.weight": "constant"}
    task, uploads = make(make_task, train_a), Uploads()
    begun = copy.deepcopy(task.state_dict())
    stream = make_stream(num_experiences=1, partition="dirichlet", rounds_per_experience=1)
    fit(task, stream, [uploads], local_epochs=5, reductions=rules, max_vectorized_clients=1)
    after, wanted = task.state_dict(), uploads.mean(full)
    away = float((full(after) - wanted).abs().max())
    moved = float((wanted - full(begun)).abs().max())
    assert (away > 1e-3 * moved) if train_a else (away < 1e-6)
    assert torch.equal(after["model.net.1.a.weight"], begun["model.net.1.a.weight"]) != train_a
    torch.testing.assert_close(after["model.net.3.weight"], uploads.mean(lambda state: state["model.net.3.weight"]))
    assert torch.equal(after["model.net.1.layer.weight"], begun["model.net.1.layer.weight"])


def test_lora_initial_outputs_equal_the_network():
    plain = MLP([6, 5, 4])
    adapted, x = LoRA(copy.deepcopy(plain), head="3.*"), torch.randn(7, 6)
    assert torch.equal(adapted(x), plain(x)) and torch.equal(adapted.embed(x), plain.embed(x))
    assert adapted.features == 5


def test_lora_update_has_the_given_rank_and_scale():
    adapted = LoRA(MLP([30, 20, 4]), rank=3, alpha=6.0, head="3.*")
    layer = adapted.net[1]
    nn.init.normal_(layer.b.weight)
    x = torch.randn(50, 30)
    added = layer(x) - layer.layer(x)
    torch.testing.assert_close(added, 2 * x @ layer.a.weight.T @ layer.b.weight.T, rtol=1e-4, atol=1e-5)
    assert int(torch.linalg.matrix_rank(added.double(), rtol=1e-5)) == 3


def test_lora_constant_a_uploads_only_b_and_head(fit, make_stream, make_task):
    metrics = ContinualMetrics()
    fit(make(make_task, False), make_stream(), [metrics], reductions={"model.*.a.weight": "constant"})
    sent = metrics.record["rounds"][-1]["upload_bytes"]
    assert set(sent.values()) == {4 * (2 * 16 + 16 * 4 + 4)}


def test_lora_frozen_at_zero_equals_fedavg_of_the_head(fit, make_stream, make_task):
    torch.manual_seed(0)
    plain = MLP([6, 16, 4])
    adapted = LoRA(copy.deepcopy(plain), head="3.*")
    adapted.net[1].requires_grad_(False)
    plain[1].requires_grad_(False)
    tasks = [make_task(model=adapted), make_task(model=plain)]
    for task in tasks:
        fit(task, make_stream())
    torch.testing.assert_close(tasks[0].model.net[3].weight, tasks[1].model[3].weight, rtol=0, atol=1e-6)


@pytest.mark.seconds
def test_lora_vectorized_equals_sequential(fit, make_stream, make_task):
    tasks = [make(make_task), make(make_task)]
    for task, size in zip(tasks, (1, 3), strict=True):
        trainer = fit(task, make_stream(partition="dirichlet"), max_vectorized_clients=size)
        assert trainer.strategy.federation.local_trainer.num_vectorized_clients == size
    for name, value in tasks[0].state_dict().items():
        torch.testing.assert_close(tasks[1].state_dict()[name], value, rtol=0, atol=1e-5)


@pytest.mark.seconds
def test_lora_adapts_layers_of_a_vision_transformer():
    net = ViT(num_classes=4, image_size=32, width=24, depth=1, num_heads=2)
    x = torch.randn(2, 3, 32, 32)
    wanted = net.eval()(x)
    adapted = LoRA(net, rank=2).eval()
    assert torch.equal(adapted(x), wanted)
    learning = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name for name in learning if "head" in name} == {"net.head.weight", "net.head.bias"}
    assert all(name.endswith((".a.weight", ".b.weight")) for name in learning if "head" not in name)
    adapted.train()(x).sum().backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("head", ["head.*", "*"])
def test_lora_head_matching_nothing_or_all_raises(head):
    with raises(InvalidValueError, "head"):
        LoRA(MLP([6, 5, 4]), head=head)
