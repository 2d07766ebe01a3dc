"""Tests of BCN: the maximizing and the minimizing steps in its loss, and training compared with a hand-written loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn

from lightning_fcl.callbacks import BCN
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.methods.episodic import worst_inputs


@pytest.fixture
def in_turn(monkeypatch):
    """Replace random draws of samples by draws in order."""
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.arange(size[0]) % high)


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves)


def by_hand(task, data, past, beta=0.99, eps=0.1, x_steps=2, theta_steps=5, rate=0.001, batch=12):
    """Train with a plain PyTorch loop that computes each term of the loss separately."""
    optimizer, params = task.configure_optimizers(), list(task.parameters())
    for _ in range(2):
        for x_new, y_new in zip(*(part.split(8) for part in data), strict=True):
            pool = [torch.cat([old, new]) for old, new in zip(past, (x_new, y_new), strict=True)]
            x, y = (part[torch.arange(batch) % len(part)] for part in pool)
            delta = torch.zeros_like(x)
            for _ in range(x_steps if eps else 0):
                delta.requires_grad_()
                up = gradients(F.cross_entropy(task(x + delta), y), delta)[0]
                rows = [d + eps * g / max(float(g.norm()), 1e-12) for d, g in zip(delta.detach(), up, strict=True)]
                delta = torch.stack([row * min(1.0, eps / max(float(row.norm()), 1e-12)) for row in rows])
            other = copy.deepcopy(task)
            for _ in range(theta_steps):
                down = gradients(F.cross_entropy(other(x), y), list(other.parameters()))
                with torch.no_grad():
                    for p, g in zip(other.parameters(), down, strict=True):
                        p -= rate * g
            terms = [
                (beta, gradients(F.cross_entropy(task(x_new), y_new), params)),
                (1.0, gradients(F.cross_entropy(task(x), y), params)),
                (1.0, gradients(F.cross_entropy(task(x + delta), y), params)),
                (-1.0, gradients(F.cross_entropy(task(x), y), params)),
                (1.0, gradients(F.cross_entropy(other(x), y), list(other.parameters()))),
                (-1.0, gradients(F.cross_entropy(task(x), y), params)),
            ]
            for i, p in enumerate(params):
                p.grad = sum(weight * pieces[i] for weight, pieces in terms)
            optimizer.step()


def two_tasks(make_task, samples, train, method):
    """Train a module on two tasks. Return the module, its copy after the first task, and the samples of both tasks."""
    task, first, second = make_task(), samples([0, 1]), samples([2, 3], seed=1)
    train(task, [method], first)
    copied = copy.deepcopy(task)
    train(task, [method], second)
    return task, copied, first, second


# Tests of the steps that change inputs or parameters.


def test_worst_inputs_raises_loss_within_eps():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 4, 4), torch.randn(3, 4, 4)

    # Return the gradient of (w . x)^3 with respect to x, for each sample.
    def gradient(moved):
        return 3 * (moved * weight).sum(dim=(1, 2, 3), keepdim=True).square() * weight

    once, twice = (worst_inputs(x, gradient, 0.1, steps) for steps in (1, 2))
    torch.testing.assert_close((once - x).norm(dim=1), torch.full((5, 4, 4), 0.1))
    # The direction of the gradient is constant. The first step reaches the largest distance, so a second step has no
    # effect.
    torch.testing.assert_close(twice, once)
    assert ((once * weight).sum(dim=(1, 2, 3)) > (x * weight).sum(dim=(1, 2, 3))).all()
    assert worst_inputs(x, gradient, 0.1, 0) is x
    still = worst_inputs(x, torch.zeros_like, 0.1, 2)
    torch.testing.assert_close(still, x, rtol=0, atol=0)


def test_worst_inputs_beyond_eps_moves_back_to_border():
    ways = iter([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])])
    moved = worst_inputs(torch.zeros(1, 2), lambda x: next(ways), 0.1, 2)
    torch.testing.assert_close(moved, torch.tensor([[0.1, 0.1]]) / 2**0.5)


# Tests of the loss.


@pytest.mark.parametrize("rests", [{"eps": 0.0, "theta_steps": 0}, {"x_steps": 0, "theta_steps": 0}])
def test_bcn_without_players_equals_plain_replay(make_task, samples, train, assert_same, in_turn, rests):
    task, copied, first, second = two_tasks(make_task, samples, train, BCN(1.0, batch_size=12, **rests))
    by_hand(copied, second, first, eps=0.0, theta_steps=0)
    assert_same(task, copied)


# The pool starts with the 20 stored samples. A batch of 12 has stored samples only. A batch of 25 has all 20
# stored samples, and new samples.
@pytest.mark.parametrize("batch", [12, 25])
@pytest.mark.parametrize(
    "players",
    [
        {},
        {"theta_steps": 0, "eps": 0.5},
        {"eps": 0.0, "inner_lr": 0.2, "beta": 0.5},
        {"eps": 0.3, "x_steps": 3, "theta_steps": 2, "inner_lr": 0.1},
    ],
)
def test_bcn_loss_equals_hand_written_terms(make_task, samples, train, assert_same, in_turn, players, batch):
    method = BCN(1.0, batch_size=batch, **players)
    task, copied, first, second = two_tasks(make_task, samples, train, method)
    rehearsal = copy.deepcopy(copied)
    options = {name.replace("inner_lr", "rate"): value for name, value in players.items()}
    by_hand(copied, second, first, batch=batch, **options)
    assert_same(task, copied)
    by_hand(rehearsal, second, first, batch=batch, beta=method.beta, eps=0.0, theta_steps=0)
    with pytest.raises(AssertionError):
        assert_same(task, rehearsal, 1e-5)


def test_bcn_samples_of_all_past_tasks_form_one_pool(make_task, samples, train, assert_same, in_turn):
    method, task, first, second = BCN(1.0, batch_size=30), make_task(), samples([0, 1]), samples([2], number=8, seed=1)
    for data in (first, second):
        train(task, [method], data)
    copied, third = copy.deepcopy(task), samples([0, 3], seed=2)
    train(task, [method], third)
    by_hand(copied, third, [torch.cat(pair) for pair in zip(first, second, strict=True)], batch=30)
    assert_same(task, copied)


def test_bcn_draws_past_and_current_samples_in_each_step(make_task, samples, train, monkeypatch):
    drawn, randint = [], torch.randint

    def watched(high, size):
        drawn.append((high, randint(high, size)))
        return drawn[-1][1]

    monkeypatch.setattr(torch, "randint", watched)
    two_tasks(make_task, samples, train, BCN(0.5, batch_size=40, theta_steps=0))
    # The pool has 10 stored samples and a batch of 8, 8 or 4 new samples.
    assert [high for high, _ in drawn] == [18, 18, 14] * 2
    assert len({tuple(rows.tolist()) for _, rows in drawn}) == 6
    assert all(len(rows) == 40 and int(rows.max()) >= 10 for _, rows in drawn)


def test_bcn_dropout_and_batch_norm_stay_consistent(make_task, samples, train):
    """Batch normalization counts each of the 12 training batches once, and all values stay finite."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    task = make_task(model=model)
    method = BCN(1.0)
    for seed, classes in enumerate([[0, 1], [2, 3]]):
        train(task, [method], samples(classes, seed=seed))
    assert int(model[1].num_batches_tracked) == 12
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())


# Tests of invalid inputs.


class Counts(nn.Linear):
    def forward(self, x):
        return super().forward(x.float())


def test_bcn_integer_inputs_raise_unless_eps_is_zero(make_task, samples, train):
    for method in (BCN(1.0), BCN(1.0, eps=0.0)):
        task = make_task(model=Counts(6, 4))
        x, y = samples()
        train(task, [method], (x.long(), y))
        if method.eps:
            with raises(InvalidTypeError, "x"):
                train(task, [method], (x.long(), y))
        else:
            train(task, [method], (x.long(), y))
