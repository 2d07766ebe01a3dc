"""Tests of LVT's method: what a client stores when a task ends, and equality with a plain training loop."""

import copy
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import FedProx, FedRep, LVTMethod
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.models import LVT

KEYS = ("model.external_key", "model.external_bias")


class Net(nn.Module):
    """A network in which the input attends to keys that are parameters."""

    def __init__(self):
        super().__init__()
        self.external_key, self.external_bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.zeros(5))
        self.value, self.head = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 4)

    def forward(self, x):
        return self.head((x @ self.external_key.T + self.external_bias).softmax(dim=-1) @ self.value)


@pytest.fixture
def make_net(make_task):
    """Return a function that makes a classifier with the network `Net`. The seed determines the initial weights."""

    def make(seed=0):
        torch.manual_seed(seed)
        return make_task(lambda params: torch.optim.SGD(params, lr=0.2), Net())

    return make


@pytest.fixture
def in_turn(monkeypatch):
    """Take replay samples in their order instead of at random."""
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **seeded: randperm(n, **seeded) if seeded else torch.arange(n))


def knowledge(task, x, y, rho):
    """Return the keys, the keys' mean absolute gradients, and the samples with a low loss, with labels and logits."""
    params = dict(task.named_parameters())
    total = {name: torch.zeros_like(params[name]) for name in KEYS}
    losses = []
    for row in range(len(y)):
        losses.append(F.cross_entropy(task(x[row : row + 1]), y[row : row + 1]))
        pieces = torch.autograd.grad(losses[-1], [params[name] for name in KEYS])
        for name, piece in zip(KEYS, pieces, strict=True):
            total[name] += piece.abs() / len(y)
    kept = []
    for label in sorted(set(y.tolist())):
        rows = sorted((float(losses[row]), row) for row in range(len(y)) if int(y[row]) == label)
        kept += [row for _, row in rows[: max(1, round(rho * len(rows)))]]
    kept.sort()
    previous = {name: params[name].detach().clone() for name in KEYS}
    return previous, total, (x[kept], y[kept], task(x[kept]).detach())


def by_hand(task, data, known, gamma=1.0, alpha=1.0, beta=0.5, temperature=2.0, size=8, epochs=2, mu=0.0):
    """Train with the loss of LVT's method in a plain PyTorch loop."""
    optimizer, params = task.configure_optimizers(), dict(task.named_parameters())
    start = {name: value.detach().clone() for name, value in params.items()}
    previous, weight, (x_old, y_old, z_old) = known
    for _ in range(epochs):
        for x, y in zip(*(part.split(8) for part in data), strict=True):
            n = min(size if size != 8 else len(y), len(y_old))
            output = task(x_old[:n])
            held = sum((weight[name] * (params[name] - previous[name])).abs().sum() for name in KEYS)
            taught = (z_old[:n] / temperature).softmax(dim=1) * (output / temperature).log_softmax(dim=1)
            loss = F.cross_entropy(task(x), y) + gamma * held + alpha * F.cross_entropy(output, y_old[:n])
            loss = loss - beta * taught.sum(dim=1).mean()
            loss = loss + mu / 2 * sum((value - start[name]).square().sum() for name, value in params.items())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# Tests of the functions of LVT's method.


def test_distillation_loss_masked_classes_equals_sliced_logits():
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
    outside = torch.tensor([True, False, False, True, False, True])
    masked = distillation_loss(student.masked_fill(outside, -torch.inf), teacher.masked_fill(outside, -torch.inf))
    torch.testing.assert_close(masked, distillation_loss(student[:, ~outside], teacher[:, ~outside]))
    gradient = torch.autograd.grad(masked.sum(), student)[0]
    sliced = torch.autograd.grad(distillation_loss(student[:, ~outside], teacher[:, ~outside]).sum(), student)[0]
    torch.testing.assert_close(gradient, sliced)


def test_lvt_stores_keys_of_last_task_and_samples_of_all_tasks(make_net, samples, train):
    method, task = LVTMethod(rho=0.3), make_net()
    first, second = samples([0, 1]), samples([2, 3, 3, 3], seed=1)
    train(task, [method], first)
    previous, gradient, one = knowledge(task, *first, 0.3)
    assert len(one[1]) == 6 and set(memory_of(method)["task"].tolist()) == {0}
    train(task, [method], second)
    # The stored keys belong to the latest task. The stored samples belong to all tasks.
    previous, gradient, two = knowledge(task, *second, 0.3)
    for name in KEYS:
        torch.testing.assert_close(memory_of(method)[f"previous.{name}"], previous[name], rtol=0, atol=0)
        torch.testing.assert_close(memory_of(method)[f"gradient.{name}"], gradient[name])
    for name, old, new in zip(("x", "y", "logits"), one, two, strict=True):
        torch.testing.assert_close(memory_of(method)[name], torch.cat([old, new]))
    assert memory_of(method)["task"].tolist() == [0] * len(one[1]) + [1] * len(two[1])
    assert memory_of(method)["y"].bincount().tolist() == [3, 3, round(0.3 * 5), round(0.3 * 15)]


# Tests of the loss.


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"gamma": 30.0, "alpha": 0.0, "beta": 0.0},
        {"gamma": 0.0, "beta": 0.0},
        {"gamma": 0.0, "alpha": 0.0, "beta": 2.0, "temperature": 5.0},
        {"gamma": 4.0, "alpha": 0.3, "beta": 0.7, "temperature": 1.0},
    ],
)
def test_lvt_loss_equals_plain_loop(make_net, samples, train, assert_same, in_turn, weights):
    method, task, first, second = LVTMethod(rho=0.5, **weights), make_net(), samples([0, 1]), samples([2, 3], seed=1)
    train(task, [method], first)
    copied, known = copy.deepcopy(task), knowledge(task, *first, 0.5)
    fine = copy.deepcopy(task)
    train(task, [method], second)
    by_hand(copied, second, known, **weights)
    assert_same(task, copied, 1e-5)
    train(fine, [], second)
    with pytest.raises(AssertionError):
        assert_same(task, fine, 1e-3)


@pytest.mark.parametrize("size", [5, 100])
def test_lvt_batch_size_and_fedprox_equal_plain_loop(make_net, samples, train, assert_same, in_turn, size):
    method, task, first, second = LVTMethod(rho=0.5, batch_size=size), make_net(), samples([0, 1]), samples([2], seed=1)
    train(task, [FedProx(2.0), method], first)
    copied, known = copy.deepcopy(task), knowledge(task, *first, 0.5)
    train(task, [FedProx(2.0), method], second, epochs=1)
    by_hand(copied, second, known, size=size, epochs=1, mu=2.0)
    assert_same(task, copied, 1e-5)


def test_lvt_task_incremental_uses_classes_of_each_task(make_net, samples, train, assert_same, in_turn):
    method, task, (first, second) = LVTMethod(0.0, rho=1.0), make_net(), (samples([0, 1]), samples([2, 3], seed=1))
    task._blocks = torch.tensor([[a // 2 == b // 2 for a in range(4)] for b in range(4)])
    train(task, [method], first)
    copied = copy.deepcopy(task)
    optimizer, taught = copied.configure_optimizers(), copied(first[0])[:8, :2].detach()
    train(task, [method], second)
    for _ in range(2):
        for x, y in zip(*(part.split(8) for part in second), strict=True):
            old = copied(first[0])[: len(y), :2]
            loss = F.cross_entropy(copied(x)[:, 2:], y - 2) + F.cross_entropy(old, first[1][: len(y)])
            loss = loss + 0.5 * distillation_loss(old, taught[: len(y)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(task, copied, 1e-5)


def test_lvt_samples_replay_samples_in_each_step(make_net, samples, train, monkeypatch):
    drawn, randperm, (first, second) = [], torch.randperm, (samples([0, 1]), samples([2, 3], seed=1))

    def watched(n):
        drawn.append(randperm(n))
        return drawn[-1]

    monkeypatch.setattr(torch, "randperm", watched)
    method, task = LVTMethod(rho=0.5), make_net()
    train(task, [method], first)
    assert not drawn
    train(task, [method], second)
    assert [len(rows) for rows in drawn] == [10] * 6 and len({tuple(rows.tolist()) for rows in drawn}) > 1


# Tests of federations, and of combinations with other methods.


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("head", ["model.head.*", "model.external_bias", "model.external_*"])
def test_lvt_with_fedrep_regularizes_only_trainable_keys(fit, make_stream, make_net, order, head):
    class Look(LVTMethod):
        def penalty(self, client, step):
            value = super().penalty(client, step)
            learnt = {name: p.detach().clone() for name, p in step.params.items()}
            seen.append(
                (
                    client.module.trainer.strategy.current_round.local_epoch,
                    learnt,
                    dict(client.method_state),
                    float(value),
                )
            )
            return value

    seen, in_head = [], {name for name in KEYS if fnmatchcase(name, head)}
    methods = [Look(3.0, 0.0, 0.0), FedRep(1, 2, head)][::order]
    trainer = fit(make_net(), make_stream(), methods, reductions={head: "local"})
    held = [(epoch, learnt, memory, value) for epoch, learnt, memory, value in seen if memory]
    assert {epoch for epoch, *_ in held} == {0, 1, 2} and any(value > 0 for *_, value in held)
    for epoch, learnt, memory, value in held:
        assert set(learnt) & set(KEYS) == (set(KEYS) - in_head if epoch else in_head)
        moved = {name: learnt[name] - memory[f"previous.{name}"] for name in KEYS if name in learnt}
        expected = 3 * sum(float((memory[f"gradient.{name}"] * by).abs().sum()) for name, by in moved.items())
        assert value == pytest.approx(expected, rel=1e-5)
    assert all(f"gradient.{name}" in trainer.strategy.server.client_store["0"]["Look"] for name in KEYS)


@pytest.mark.seconds
@pytest.mark.parametrize("participation", [1.0, 1])
def test_lvt_clients_with_different_tasks_store_their_tasks(fit, participation):
    x = np.random.default_rng(0).normal(size=(96, 3, 32, 32)).astype(np.float32)
    data = ArrayDataset(x, np.arange(96) % 6, None, tuple("abcdef"))
    plan = {"num_tasks": 2, "num_clients": 2, "rounds_per_task": 2, "classes_per_client": (2, 3)}
    plan["sample_fraction"] = (0.5, 0.5)
    stream = FederatedStream(data, scenario=FedViTScenario(**plan), split=Split(test=0.25), batch_size=4, seed=0)
    torch.manual_seed(0)
    lvt = LVT(num_classes=6, patch_size=16, width=24, depth=2, num_heads=3)
    task = Classifier(lvt, 6, lambda params: torch.optim.AdamW(params, 1e-3), task_incremental=True)
    trainer = fit(task, stream, [LVTMethod(rho=0.5)], participation=participation)
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    drawn = trainer.strategy.federation.participation.expected_clients
    for client in "01":
        memory = trainer.strategy.server.client_store.get_section(client, "LVTMethod")
        rounds = [round_idx for round_idx in range(4) if client in drawn(stream.plan, round_idx)]
        tasks = sorted({stream.plan.experiences[client][round_idx] for round_idx in rounds})
        if not tasks:
            assert not memory
            continue
        assert memory["task"].unique().tolist() == tasks
        names = [f"model.body.blocks.{i}.attention.external_{what}" for i in range(2) for what in ("key", "bias")]
        for name in names:
            assert memory[f"gradient.{name}"].min() >= 0 and memory[f"gradient.{name}"].max() > 0
            assert memory[f"previous.{name}"].shape == dict(task.named_parameters())[name].shape
        for number in tasks:
            of_task = memory["task"] == number
            assert set(memory["y"][of_task].tolist()) == set(stream.plan.tasks[client][number])


# Tests of invalid modules.


def test_lvt_model_without_keys_raises(make_task, samples, train):
    with raises(InvalidValueError, "keys"):
        train(make_task(), [LVTMethod()], samples())
    train(make_task(), [LVTMethod(gamma=0.0)], samples())
