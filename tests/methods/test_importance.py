"""Tests of EWC and MAS: the importance against a loop over samples, and training against a plain loop."""

import contextlib
import copy

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from raising import raises
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier
from lightning_fcl.callbacks import EWC, MAS, FedRep
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.methods import per_sample_gradients as module_under_test
from lightning_fcl.methods.context import Client, Step, strip_prefix
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.per_sample_gradients import (
    OuterProduct,
    outer_gradients,
    over_samples,
    per_sample_gradients,
    squared_norms,
)
from lightning_fcl.models import MLP

from .test_icarl import Trained

pytestmark = pytest.mark.rounding

KINDS = {"EWC": EWC, "MAS": MAS}
STRENGTHS = {"EWC": 5.0, "MAS": 2.0}


class Branching(nn.Module):
    """A network whose control flow depends on its input, so that gradients cannot be vectorized."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.left(x) if x.sum() > 0 else self.right(x)


class Reuse(nn.Module):
    """A network that uses the weights of a layer twice. The second use is a call of the layer or a matrix product."""

    def __init__(self, twice):
        super().__init__()
        self.last, self.first, self.twice = nn.Linear(6, 4), nn.Linear(6, 6), twice

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.first(x) if self.twice else x @ self.first.weight)


class Patches(nn.Module):
    """A network with a layer whose input has two rows per sample."""

    def __init__(self):
        super().__init__()
        self.last, self.layer = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.last(self.layer(x.reshape(-1, 3)).tanh().reshape(-1, 2, 4).sum(dim=1))


class Named(nn.Linear):
    """A layer that calls `F.linear` with keyword arguments."""

    def forward(self, x):
        return F.linear(input=x, weight=self.weight, bias=self.bias)


class Noisy(nn.Linear):
    """A layer that draws random numbers, also in evaluation mode."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


MODELS = {
    "plain": lambda: None,
    "batch norm and dropout": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 4)
    ),
    "control flow": Branching,
    "a layer twice": lambda: Reuse(True),
    "weights in a matrix product": lambda: Reuse(False),
    "two rows per sample": Patches,
    "keyword arguments": lambda: nn.Sequential(nn.Linear(6, 5), Named(5, 4)),
}


def by_loop(task, kind, x, y):
    """Return the importance of each parameter, computed with one backward pass per sample."""
    task = copy.deepcopy(task).eval()
    total = {name: torch.zeros_like(p) for name, p in task.named_parameters() if p.requires_grad}
    for i in range(len(y)):
        task.zero_grad()
        output = task(x[i : i + 1])
        (F.cross_entropy(output, y[i : i + 1]) if kind == "EWC" else (output**2).sum()).backward()
        for name, p in task.named_parameters():
            if p.grad is not None:
                total[name] += (p.grad**2 if kind == "EWC" else p.grad.abs()) / len(y)
    return total


def of(kind, task, x, y):
    method = EWC() if kind == "EWC" else MAS()
    return method.importance(Client(module=task), task.state_dict(), [x, y], [*trainable_parameters(task)])


def assert_close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_importance_equals_loop_over_samples(make_task, samples, monkeypatch, kind, model, chunk):
    monkeypatch.setattr(module_under_test, "_CHUNK", chunk)
    torch.manual_seed(1)
    task = make_task(model=MODELS[model]())
    x, y = samples()
    # Update the running statistics if the model has any.
    task(x)
    next(task.parameters()).requires_grad_(False)
    found = of(kind, task, x, y)
    assert_close(found, by_loop(task, kind, x, y))
    assert all((value >= 0).all() and value.any() for value in found.values())
    assert len(found) == len(list(task.parameters())) - 1


@pytest.mark.parametrize("model", [*MODELS, "one layer", "no gradient"])
def test_outer_gradients_equal_per_sample_gradients(make_task, samples, model):
    task, (x, y) = (
        make_task(model=nn.Linear(6, 4) if model == "one layer" else MODELS.get(model, lambda: None)()),
        samples(),
    )
    params = {name: p.detach() for name, p in task.named_parameters()}
    nothing = torch.no_grad() if model == "no gradient" else contextlib.nullcontext()

    def objective(params, x, y):
        with nothing:
            return (functional_call(task.eval(), params, (x,)) ** 3).sum()

    found = outer_gradients(objective, params, x, y)
    assert (found is not None) == (model in ("plain", "one layer"))
    for name, value in per_sample_gradients(objective, params, x, y).items() if found else ():
        outer = isinstance(found[name], OuterProduct)
        assert outer == (params[name].ndim == 2)
        stacked = torch.einsum("no,ni->noi", *found[name]) if outer else found[name]
        torch.testing.assert_close(stacked, value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(over_samples(torch.abs, found[name]), value.abs().sum(dim=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            squared_norms(found[name]), value.flatten(1).square().sum(dim=1), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("model", [*MODELS, "random"])
@pytest.mark.parametrize("kind", KINDS)
def test_importance_leaves_module_and_rng_unchanged(make_task, samples, kind, model):
    task = make_task(model=Noisy(6, 4) if model == "random" else MODELS[model]())
    task.train()
    next(task.model.children(), task.model).eval()
    modes = [module.training for module in task.modules()]
    task(samples()[0]).sum().backward()
    state, grads = copy.deepcopy(task.state_dict()), [copy.deepcopy(p.grad) for p in task.parameters()]
    rng = torch.get_rng_state()
    of(kind, task, *samples())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [module.training for module in task.modules()] == modes
    torch.testing.assert_close(dict(task.state_dict()), dict(state), rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in task.parameters()], grads, rtol=0, atol=0)


@pytest.mark.parametrize(("decay", "normalize"), [(1.0, False), (0.25, False), (1.0, True), (0.25, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_over_three_experiences_equals_plain_loop(
    make_task, samples, train, by_hand, assert_same, kind, decay, normalize
):
    task, copied, method = make_task(), make_task(), KINDS[kind](STRENGTHS[kind], decay, normalize)
    parts = [samples([0, 2]), samples([1, 3], seed=1), samples([0, 1], seed=2)]
    weights, centers, plain = {}, {}, None

    def loss(output, x, y):
        scale = max(value.max() for value in weights.values()) if normalize else 1.0
        terms = [(weights[n] / scale * (p - centers[n]) ** 2).sum() for n, p in copied.named_parameters()]
        return F.cross_entropy(output, y) + STRENGTHS[kind] / 2 * sum(terms)

    for i, part in enumerate(parts):
        train(task, [method], part)
        plain = copy.deepcopy(copied)
        by_hand(copied, part, loss if i else None)
        assert_same(task, copied, 1e-5)
        new = by_loop(copied, kind, *part)
        weights = {n: decay * weights[n] + value if i else value for n, value in new.items()}
        centers = {n: p.detach().clone() for n, p in copied.named_parameters()}
        assert_close(strip_prefix(memory_of(method), "importance"), weights)
    # Training without the penalty gives different weights.
    by_hand(plain, parts[-1])
    assert (plain.model[1].weight - task.model[1].weight).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("greatest", [1e-30, 1e4, 1e30])
def test_normalized_penalty_does_not_diverge(kind, greatest, make_task):
    """Gradient descent on the penalty alone does not diverge, even if importances differ by orders of magnitude."""
    torch.manual_seed(0)
    # The product of the learning rate and the strength is 1.9.
    rate, strength = 0.1, 19.0
    method, task = KINDS[kind](strength), make_task()
    memory = method.prepare_client_state(Client({}, task.state_dict(), ClientRound("a", 0), task))
    for name, value in memory.items():
        if name.startswith("importance."):
            memory[name] = greatest * (10 ** (-6 * torch.rand_like(value)) + torch.rand_like(value))
    memory = method.prepare_client_state(Client(memory, task.state_dict(), ClientRound("a", 1), task))
    params = {name: (p + torch.randn_like(p)).detach().requires_grad_() for name, p in task.named_parameters()}

    def distance():
        return sum(float((p - memory[f"center.{name}"]).square().sum()) for name, p in params.items())

    before = first = distance()
    for _ in range(50):
        method.penalty(Client(memory), Step(params, {}, None, torch.zeros(1), None)).backward()
        with torch.no_grad():
            for p in params.values():
                p -= rate * p.grad
                p.grad = None
        assert distance() <= before * (1 + 1e-6)
        before = distance()
    assert before < 0.9 * first


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 10)),
        )


def second_task(make, method, holds, seed, quiet):
    """Train on digits, then on rotated digits. Return the sum of squared parameter changes, weighted by importance."""
    data = load_dataset("digits")
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    torch.manual_seed(seed)
    task = Classifier(make(), 10, lambda params: torch.optim.SGD(params, lr=0.1))
    for turned in range(2):
        begun = {name: p.detach().clone() for name, p in task.named_parameters()}
        samples = DataLoader(TensorDataset(torch.rot90(x, turned, (2, 3)), y), 32, shuffle=True)
        L.Trainer(max_epochs=3, callbacks=[method] if holds or not turned else [], **quiet).fit(task, samples)
        if not turned:
            importance = {name: memory_of(method)[f"importance.{name}"].clone() for name in begun}
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in task.parameters())
    moved = ((p.detach() - begun[name]).square() for name, p in task.named_parameters())
    return sum(float((weight * square).sum()) for weight, square in zip(importance.values(), moved, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [pytest.param(Convolutional, marks=pytest.mark.long), lambda: nn.Sequential(nn.Flatten(), MLP([64, 64, 10]))],
)
def test_default_arguments_restrain_important_weights(quiet, make, kind):
    """The importance-weighted change is less than half of the change in fine-tuning.

    With five seeds, the ratio of the two changes is 0.20 to 0.34.
    """
    held, free = (
        sum(second_task(make, KINDS[kind](), holds, seed, quiet) for seed in range(2)) for holds in (True, False)
    )
    assert 0 < held < 0.5 * free


@pytest.mark.parametrize("max_vectorized_clients", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_importance_is_kept_per_client(fit, make_stream, make_task, kind, max_vectorized_clients):
    stream, task, trained = make_stream(num_experiences=1, rounds_per_experience=2), make_task(), Trained()

    trainer = fit(task, stream, [KINDS[kind](STRENGTHS[kind]), trained], max_vectorized_clients=max_vectorized_clients)
    assert len(trained.states) == 3
    own = make_task()
    for client, state in trained.states.items():
        own.load_state_dict(state)
        memory = trainer.strategy.server.client_store[client][kind]
        x, y = stream.get_samples(stream.plan.train[1][client])
        assert_close(strip_prefix(memory, "importance"), by_loop(own, kind, x, y))
        assert_close(strip_prefix(memory, "center"), {n: p.detach() for n, p in own.named_parameters()})


@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS)
def test_importance_with_fedrep_includes_frozen_head(fit, make_stream, make_task, kind):
    stream, trained = make_stream(rounds_per_experience=2), Trained()

    methods = [KINDS[kind](0.1, decay=0.0), FedRep(1, 1, head_pattern="model.3.*"), trained]
    trainer = fit(make_task(), stream, methods, reductions={"model.3.*": "local"})
    assert len(trained.states) == 3
    own = make_task()
    for client, state in trained.states.items():
        own.load_state_dict(state)
        found = strip_prefix(trainer.strategy.server.client_store[client][kind], "importance")
        assert_close(found, by_loop(own, kind, *stream.get_samples(stream.plan.train[3][client])))
        assert all(value.any() for value in found.values())


def test_importance_double_precision_keeps_dtype(make_task, samples, train):
    for kind, method in KINDS.items():
        used, task = method(STRENGTHS[kind]), make_task()
        train(task, [used], samples(), precision="64-true")
        assert all(value.dtype == torch.float64 for value in memory_of(used).values())


class Pair(L.LightningModule):
    """A module whose forward pass returns more than one tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x), x

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0])[0], batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_mas_output_not_a_tensor_raises(samples, train):
    with raises(InvalidTypeError, "forward"):
        train(Pair(), [MAS()], samples())
