"""Tests of GEM and A-GEM: stored samples, projected gradients, and equality with a plain training loop."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from raising import raises
from torch import nn

from lightning_fcl.callbacks import AGEM, GEM, FedProx, Replay
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.episodic import add_task_memory, finite_pairs, past_tasks, stratified_indices
from lightning_fcl.methods.method import Method

pytestmark = pytest.mark.rounding


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mean_gradient(task, x, y):
    """Return the gradient of the mean loss as one vector."""
    loss = F.cross_entropy(task(x), y)
    return torch.cat([piece.flatten() for piece in torch.autograd.grad(loss, list(task.parameters()))])


def by_hand_projected(task, data, remembered, projection, epochs=2, batch=8, clip=None):
    """Train in a plain loop with ``projection(gradient, past_gradients)``. Return the number of changed gradients."""
    optimizer, changed = task.configure_optimizers(), 0
    for _ in range(epochs):
        for x, y in zip(*(part.split(batch) for part in data), strict=True):
            gradient = mean_gradient(task, x, y)
            result = projection(gradient, [mean_gradient(task, *pair) for pair in remembered])
            changed += not torch.equal(result, gradient)
            if clip is not None:
                result = result * min(1.0, clip / (float(result.norm()) + 1e-6))
            pieces = result.split([p.numel() for p in task.parameters()])
            for p, piece in zip(task.parameters(), pieces, strict=True):
                p.grad = piece.view_as(p).clone()
            optimizer.step()
    return changed


def one_by_closed_form(gradient, references):
    """Return the projected gradient of A-GEM (equation 11), computed in double precision."""
    g, r = gradient.double(), references[0].double()
    return (g - min(float(g @ r), 0.0) / float(r @ r) * r).to(gradient.dtype)


# Tests of stored samples.


def test_stratified_indices_keep_class_proportions():
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)[torch.randperm(100, generator=generator())]
    for size in (10, 20, 50, 100):
        chosen = stratified_indices(y, size, generator())
        assert y[chosen].bincount().tolist() == [6 * size // 10, 3 * size // 10, size // 10]
        assert len(set(chosen.tolist())) == size and chosen.tolist() == sorted(chosen.tolist())


def test_stratified_indices_fractional_shares_rounded():
    y = torch.tensor([0] * 98 + [7] + [3])
    for size in range(1, 101):
        counts = y[stratified_indices(y, size, generator(size))].unique(return_counts=True)[1]
        assert counts.sum() == size
        # Each of the three classes has at least one sample if `size` is at least 3.
        assert len(counts) == (3 if size >= 3 else 1)
    y = torch.arange(5).repeat_interleave(7)
    for size in range(1, 36):
        counts = y[stratified_indices(y, size, generator(size))].bincount(minlength=5)
        assert counts.sum() == size and counts.max() - counts.min() <= 1


def test_stratified_indices_samples_at_random():
    y = torch.tensor([0, 0, 1, 1])
    assert {tuple(stratified_indices(y, 2, generator(s)).tolist()) for s in range(60)} == {
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
    }
    assert {y[stratified_indices(y, 1, generator(s))].item() for s in range(20)} == {0, 1}


def test_stratified_indices_edge_cases():
    assert len(stratified_indices(torch.zeros(9).long(), 4, generator())) == 4
    assert stratified_indices(torch.tensor([3, 1]), 10, generator()).tolist() == [0, 1]
    assert stratified_indices(torch.zeros(0).long(), 10, generator()).tolist() == []


def data(labels, first=0):
    y = torch.tensor(labels)
    return [torch.arange(first, first + len(y)).float()[:, None], y]


def client_in(memory=None, round_idx=0, experience=0):
    return Client(memory or {}, {}, ClientRound("a", round_idx, experience))


def test_add_task_memory_replaces_samples_of_same_task():
    memory, rng = {}, generator()
    for round_idx, (experience, part) in enumerate(
        [(0, data([0, 1] * 10)), (0, data([0, 1] * 10, 20)), (2, data([2] * 40, 40))]
    ):
        memory = add_task_memory(client_in(memory, round_idx, experience), part, 0.1, rng)
    assert memory["task"].tolist() == [0, 0, 2, 2, 2, 2] and memory["y"].tolist() == [0, 1, 2, 2, 2, 2]
    assert all(20 <= x < 40 for x in memory["x"][:2, 0]) and all(40 <= x < 80 for x in memory["x"][2:, 0])
    (x, y), *others = past_tasks(Client(memory, {}, ClientRound("a", 2, experience_idx=2)))
    assert not others and torch.equal(x, memory["x"][:2]) and torch.equal(y, memory["y"][:2])
    both = past_tasks(Client(memory, {}, ClientRound("a", 3, experience_idx=3)))
    assert [len(y) for _, y in both] == [2, 4]


def test_add_task_memory_size_is_number_or_share():
    for size, kept in ((1, 1), (1.0, 20), (0.25, 5), (0.001, 1), (7, 7), (100, 20)):
        assert len(add_task_memory(client_in(), data([0] * 20), size, generator())["y"]) == kept


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_add_task_memory_non_finite_samples_dropped(caplog, number):
    x, y = torch.randn(9, 2, 3), torch.arange(9)
    assert all(left is right for left, right in zip(finite_pairs([x, y]), (x, y), strict=True)) and not caplog.records
    x[4, 1, 2] = x[7, 0, 0] = number
    memory = add_task_memory(client_in(), [x, y], 1.0, generator())
    assert memory["y"].tolist() == [0, 1, 2, 3, 5, 6, 8] and torch.equal(memory["x"], x[memory["y"]])
    assert caplog.messages == ["Ignored 2 of 9 samples of a client: their inputs have non-finite values."]


@pytest.mark.parametrize("participation", [1.0, 1])
def test_gem_client_stores_samples_of_each_trained_task(fit, make_stream, make_task, participation):
    owners = np.array(["a", "b", "c"])[np.arange(240) // 4 % 3]
    stream = make_stream(client_ids=owners, rounds_per_experience=2)
    trainer = fit(make_task(), stream, [GEM(0.2)], participation=participation)
    drawn = trainer.strategy.federation.participation.expected_clients
    for client in "abc":
        memory = trainer.strategy.server.client_store.get_section(client, "GEM")
        trained = [round_idx for round_idx in range(4) if client in drawn(stream.plan, round_idx)]
        assert set(memory.get("task", torch.zeros(0)).tolist()) == {round_idx // 2 for round_idx in trained}
        for round_idx in trained:
            client_round = stream.client_round(client, round_idx)
            expected = [count / 5 for count in client_round.labels.bincount(minlength=4).tolist()]
            kept = memory["y"][memory["task"] == client_round.experience_idx].bincount(minlength=4).tolist()
            assert all(abs(left - right) < 1 for left, right in zip(kept, expected, strict=True))
            assert sum(kept) == int(0.5 + client_round.num_samples / 5)


def test_gem_client_without_data_in_task_stores_no_samples(fit, make_stream, make_task):
    """Client b has no data in the first experience, so it stores samples of the second experience only."""
    stream = make_stream(client_ids=np.array(["a", "b"])[np.arange(240) // 4 % 2])
    stream.setup("fit")
    del stream.plan.train[0]["b"]
    trainer = fit(make_task(), stream, [GEM(0.2)])
    store = trainer.strategy.server.client_store
    assert store["a"]["GEM"]["task"].unique().tolist() == [0, 1]
    assert store["b"]["GEM"]["task"].unique().tolist() == [1]


# Tests of projected gradients.


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.2, 1), (None, 2)])
@pytest.mark.parametrize("method", [lambda: GEM(1.0, margin=0.0), lambda: AGEM(1.0)])
def test_one_past_task_equals_closed_form_before_clipping(
    make_task, samples, train, assert_same, method, clip, accumulate
):
    method, task, first, second = method(), make_task(), samples([0, 1]), samples([2, 3], number=16, seed=1)
    train(task, [method], first)
    copied = copy.deepcopy(task)
    train(task, [method], second, gradient_clip_val=clip, accumulate_grad_batches=accumulate)
    assert by_hand_projected(copied, second, [first], one_by_closed_form, batch=8 * accumulate, clip=clip)
    assert_same(task, copied)


def test_agem_samples_reference_batch():
    memory = add_task_memory(client_in(), data([0] * 50), 1.0, generator())
    client, drawn = Client(memory, {}, ClientRound("a", 1, experience_idx=1)), []

    def gradient_of(x, y):
        drawn.append(tuple(x[:, 0].int().tolist()))
        return torch.ones(2)

    for _ in range(3):
        AGEM(batch_size=5).project_gradient(client, -torch.ones(2), gradient_of)
    assert all(len(set(batch)) == 5 for batch in drawn) and len(set(drawn)) == 3


class Noisy(nn.Module):
    """A network with dropout, batch normalization, a layer that does not affect the loss, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head, self.unused, self.frozen = nn.Linear(8, 4), nn.Linear(2, 2), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.head(self.body(x)))


def test_gradient_fn_leaves_module_and_rng_unchanged(make_task, samples, train, assert_same):
    class Look(Method):
        def project_gradient(self, client, gradient, gradient_fn):
            seen.append((gradient, gradient_fn(*remembered), gradient_fn(*remembered)))
            return gradient

    seen, remembered = [], samples(seed=7)
    torch.manual_seed(0)
    model = Noisy()
    looked, plain = make_task(model=copy.deepcopy(model)), make_task(model=model)
    torch.manual_seed(1)
    train(looked, [Look()], samples())
    state = torch.get_rng_state()
    torch.manual_seed(1)
    train(plain, [], samples())
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(looked, plain, 0)
    assert int(looked.model.body[1].num_batches_tracked) == len(seen) == 6
    parameters = sum(p.numel() for part in (model.body, model.head) for p in part.parameters())
    for gradient, once, twice in seen:
        assert gradient.shape == once.shape == (parameters,)
        assert torch.equal(once, twice) and not torch.equal(once, gradient) and once.abs().max() > 0


def test_gradient_fn_uses_training_mode(make_task, samples, train):
    class Look(Method):
        def project_gradient(self, client, gradient, gradient_fn):
            seen.append(gradient_fn(*remembered))
            expected.append(mean_gradient(copy.deepcopy(task.model), *remembered))
            assert task.model.training
            return gradient

    seen, expected, remembered = [], [], samples(seed=7)
    task = make_task(model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    train(task, [Look()], samples())
    for left, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_gradient_fn_uses_trainer_precision(make_task, samples, train, precision):
    class Look(Method):
        def project_gradient(self, client, gradient, gradient_fn):
            seen.append((gradient, gradient_fn(*batch)))
            return gradient

    seen, batch = [], samples(number=8)
    train(make_task(), [Look()], batch, precision=precision)
    assert len(seen) == 2 and all(torch.equal(*pair) for pair in seen)
    assert seen[0][0].dtype == (torch.float64 if precision == "64-true" else torch.float32)


# Tests of combinations with other methods, and of invalid data.


def test_gem_with_replay_stores_no_replay_samples(make_task, samples, train):
    first, second = samples([0, 1]), samples([2, 3], seed=1)
    for order in (lambda a, b: [a, b], lambda a, b: [b, a]):
        method, replay, task = GEM(1.0), Replay(5), make_task()
        train(task, order(method, replay), first)
        train(task, order(method, replay), second)
        assert len(memory_of(replay)["y"]) == 5 and len(memory_of(method)["y"]) == 40
        assert sorted(memory_of(method)["y"][memory_of(method)["task"] == 1].tolist()) == sorted(second[1].tolist())


def test_gem_with_fedprox_equals_plain_loop(make_task, samples, train, assert_same):
    method, task, first, second = GEM(1.0, margin=0.0), make_task(), samples([0, 1]), samples([2, 3], seed=1)
    train(task, [method, FedProx(0.0)], first)
    copied = copy.deepcopy(task)
    train(task, [FedProx(3.0), method], second, epochs=1)
    start = [p.detach().clone() for p in copied.parameters()]

    def with_penalty(gradient, past):
        drift = torch.cat([(p - s).flatten() for p, s in zip(copied.parameters(), start, strict=True)])
        return one_by_closed_form(gradient + 3.0 * drift.detach(), past)

    assert by_hand_projected(copied, second, [first], with_penalty, epochs=1)
    assert_same(task, copied)


def test_add_task_memory_not_pairs_raises():
    with raises(InvalidTypeError, "data"):
        add_task_memory(client_in(), [1, 2, 3], 1, generator())
