"""Tests of the mean output loss: the term against NumPy, and training against a plain loop."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import FedProx, MeanOutputLoss, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.methods.class_losses import mean_output_loss
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.models import DSICNet
from lightning_fcl.models.quantization import fold_batchnorm

OUTPUTS = ("probabilities", "log-probabilities", "logits")
NEW = torch.tensor([False, False, True, True, True, False])
# Class 5 is neither new nor old.
OLD = torch.tensor([True, True, False, False, False, False])


def in_numpy(logits, target, new, old, outputs, distance):
    """Return the mean output loss of each sample, computed in a NumPy loop."""
    result = []
    for row, label in zip(np.asarray(logits, dtype=np.float64), np.asarray(target), strict=True):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        values = {"logits": row, "probabilities": probabilities, "log-probabilities": np.log(probabilities)}[outputs]
        others = [values[c] for c in range(len(row)) if new[c] and c != label]
        earlier = [values[c] for c in range(len(row)) if old[c]]
        gap = np.mean(others) - np.mean(earlier) if others and earlier else 0.0
        result.append(gap**2 if distance == "squared" else abs(gap))
    return result


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("distance", ["squared", "absolute"])
def test_mean_output_loss_equals_numpy(outputs, distance):
    logits, target = 3 * torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 6
    found = mean_output_loss(logits, target, NEW, OLD, outputs, distance)
    assert found.shape == (40,)
    np.testing.assert_allclose(found, in_numpy(logits, target, NEW, OLD, outputs, distance), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("distance", ["squared", "absolute"])
def test_mean_output_loss_on_logits_has_no_target_gradient(distance):
    logits, target = torch.randn(30, 6, requires_grad=True), torch.arange(30) % 3 + 2
    mean_output_loss(logits, target, NEW, OLD, "logits", distance).sum().backward()
    chosen = F.one_hot(target, 6).bool()
    assert (logits.grad[chosen] == 0).all() and (logits.grad[:, 5] == 0).all()
    assert (logits.grad[~chosen & (NEW | OLD)] != 0).all()


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("distance", ["squared", "absolute"])
def test_mean_output_loss_invariant_to_common_shift(outputs, distance):
    logits, target = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 3 + 2
    values = [mean_output_loss(logits + shift, target, NEW, OLD, outputs, distance) for shift in (0.0, -7.0, 100.0)]
    assert values[0].abs().max() > 1e-3
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_mean_output_loss_without_old_or_other_new_classes_is_zero(outputs):
    logits, target = torch.randn(4, 6, requires_grad=True), torch.tensor([2, 2, 3, 5])
    nobody = torch.zeros(6, dtype=torch.bool)
    assert mean_output_loss(logits, target, NEW, nobody, outputs).tolist() == [0] * 4
    assert mean_output_loss(logits, target, nobody, OLD, outputs).tolist() == [0] * 4
    only = F.one_hot(torch.tensor(2), 6).bool()
    found = mean_output_loss(logits, target, only, OLD, outputs)
    assert found[:2].tolist() == [0, 0] and (found[2:] > 0).all()
    found.sum().backward()
    assert (logits.grad[:2] == 0).all() and logits.grad.isfinite().all()


def loss_by_hand(output, y, new, old, mu=2.0, outputs="probabilities", distance="squared", scope="session"):
    """Return the mean over a batch of cross-entropy plus mean output loss, computed sample by sample."""
    total = torch.zeros(())
    values = {"logits": output, "probabilities": output.softmax(1), "log-probabilities": output.log_softmax(1)}[outputs]
    for row, value, label in zip(output, values, y.tolist(), strict=True):
        classes = {"session": new, "seen": [*new, *old], "all": range(len(row))}[scope]
        if scope == "session" and label in old:
            classes = [*new, *old]
        total = total + row[list(classes)].logsumexp(0) - row[label]
        others = [c for c in new if c != label]
        if others and old:
            gap = value[others].mean() - value[list(old)].mean()
            total = total + mu * (gap**2 if distance == "squared" else gap.abs())
    return total / len(y)


def steps_by_hand(task, stream, loss):
    """Train the rounds of a federation of one client in a plain loop, without shuffling."""
    optimizer, client = task.configure_optimizers(), stream.plan.clients[0]
    task.train()
    for current in stream.plan.train:
        server = {name: value.detach().clone() for name, value in task.named_parameters()}
        x, y = stream.get_samples(current[client])
        labels = set(y.tolist())
        for xs, ys in zip(x.split(stream.batch_size), y.split(stream.batch_size), strict=True):
            optimizer.zero_grad()
            loss(task(xs), ys, labels, server).backward()
            optimizer.step()


@pytest.mark.parametrize("scope", ["session", "seen", "all"])
@pytest.mark.parametrize(
    ("outputs", "distance"), [("probabilities", "squared"), ("logits", "absolute"), ("log-probabilities", "squared")]
)
def test_one_client_federation_equals_plain_loop(fit, make_stream, make_task, assert_same, scope, outputs, distance):
    stream = make_stream(num_clients=1, class_order=[2, 0, 3, 1], shuffle=False, rounds_per_experience=2, batch_size=64)
    task, copied, sessions = make_task(), make_task(), [(0, 2), (1, 3)]
    fit(task, stream, [MeanOutputLoss(1.5, outputs, distance, scope)], max_vectorized_clients=1)

    def loss(output, y, labels, server):
        number = sessions.index(tuple(sorted(labels)))
        old = [c for session in sessions[:number] for c in session]
        return loss_by_hand(output, y, sessions[number], old, 1.5, outputs, distance, scope)

    steps_by_hand(copied, stream, loss)
    assert_same(task, copied)


@pytest.mark.seconds
def test_mean_output_with_fedprox_on_head_equals_plain_loop(fit, assert_same):
    rng = np.random.default_rng(0)
    y = np.arange(48) % 4
    x = rng.normal(size=(48, 1, 16, 16)).astype(np.float32) + y[:, None, None, None].astype(np.float32)
    stream = FederatedStream.from_arrays(
        x,
        y,
        scenario=ClassIncremental(num_experiences=2, rounds_per_experience=2, class_order=[0, 1, 2, 3]),
        partition=IID(1),
        shuffle=False,
        batch_size=8,
    )
    torch.manual_seed(0)
    net = DSICNet(4, (16, 16)).eval()
    fold_batchnorm(net)
    net.backbone.requires_grad_(False)
    task = Classifier(net, 4, lambda params: torch.optim.SGD(params, lr=0.05))
    copied, before = copy.deepcopy(task), copy.deepcopy(net.backbone.state_dict())
    fit(task, stream, [MeanOutputLoss(2.0), FedProx(3.8, pattern="model.head.*")], max_vectorized_clients=1)

    def loss(output, y, labels, server):
        new, old = ([0, 1], []) if labels == {0, 1} else ([2, 3], [0, 1])
        head = [(p, server[name]) for name, p in copied.named_parameters() if name.startswith("model.head.")]
        near = sum(((p - q) ** 2).sum() for p, q in head)
        return loss_by_hand(output, y, new, old) + 3.8 / 2 * near

    steps_by_hand(copied, stream, loss)
    assert_same(task, copied)
    assert all(torch.equal(value, before[name]) for name, value in net.backbone.state_dict().items())


def a_step(y, classes=6):
    return Step({}, {}, None, torch.randn(len(y), classes, requires_grad=True), None, y=torch.tensor(y))


@pytest.mark.parametrize("scope", ["session", "seen"])
def test_replay_sample_cross_entropy_is_over_all_seen_classes(scope):
    """Session samples use the session's classes or all seen classes. Replay samples always use all seen classes."""
    method, step = MeanOutputLoss(0.0, cross_entropy=scope), a_step([0, 1, 3, 4])
    task = F.cross_entropy(step.output, step.y)
    found = task + method.penalty(Client({"new": NEW, "old": OLD}), step)
    rows = [step.output[i, [0, 1, 2, 3, 4]] for i in range(4)]
    labels = [0, 1, 3, 4]
    if scope == "session":
        rows[2:], labels[2:] = [step.output[i, [2, 3, 4]] for i in (2, 3)], [1, 2]
    expected = sum(F.cross_entropy(row, torch.tensor(label)) for row, label in zip(rows, labels, strict=True)) / 4
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    gradients = [torch.autograd.grad(loss, step.output, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_future_class_cross_entropy_is_over_session_and_itself():
    """The cross-entropy of a later session's sample is over the current session's classes and the sample's class.

    With ``history="all"``, clients can have samples of later sessions.
    """
    method, step = MeanOutputLoss(0.0), a_step([5])
    found = F.cross_entropy(step.output, step.y) + method.penalty(Client({"new": NEW, "old": OLD}), step)
    assert found.item() == pytest.approx(F.cross_entropy(step.output[:, 2:], torch.tensor([3])).item(), abs=1e-6)


def test_mean_output_with_replay_equals_plain_loop(fit, make_stream, make_task, assert_same):
    """The labels of the replay samples are added to the batches together with the samples."""
    stream = make_stream(num_clients=1, class_order=[0, 1, 2, 3], shuffle=False, batch_size=100)
    task, copied = make_task(), make_task()
    replay = Replay(1000, "class-balanced", "experience")
    fit(task, stream, [replay, MeanOutputLoss(2.0)], max_vectorized_clients=1)
    optimizer = copied.configure_optimizers()
    first, second = (stream.get_samples(current["0"]) for current in stream.plan.train)
    batches = [(first, [0, 1], []), ([torch.cat(pair) for pair in zip(second, first, strict=True)], [2, 3], [0, 1])]
    for (x, y), new, old in batches:
        optimizer.zero_grad()
        loss_by_hand(copied(x), y, new, old).backward()
        optimizer.step()
    assert_same(task, copied)


@pytest.mark.parametrize("scope", ["session", "seen", "all"])
def test_plain_trainer_each_fit_is_a_session(make_task, samples, train, by_hand, assert_same, scope):
    task, copied, method = make_task(), make_task(), MeanOutputLoss(1.5, cross_entropy=scope)
    old: list[int] = []
    for seed, classes in enumerate([(0, 2), (1, 3)]):
        data = samples(classes, seed=seed)
        train(task, [method], data)
        known = tuple(old)

        def loss(output, x, y, known=known):
            new = [c for c in sorted(set(y.tolist())) if c not in known]
            return loss_by_hand(output, y, new, list(known), 1.5, scope=scope)

        by_hand(copied, data, loss)
        old += classes
    assert_same(task, copied)


def test_domain_incremental_vectorized_equals_sequential(fit, make_stream, make_task, assert_same):
    """Without classes per experience, a class of a batch is new if no earlier experience of the client had it.

    The highest label differs from client to client. The last batch of client 1 has one sample, which vectorized
    training pads.
    """
    owner = np.array([1, 1, 0, 0])[np.arange(240) % 4]
    owner[[4, 8, 9, 124, 128, 129]] = 2
    options = {"scenario": "domain-incremental", "group": np.arange(240) // 120, "test": 0.0}
    tasks = []
    for size in (1, "auto"):
        tasks.append(make_task())
        fit(tasks[-1], make_stream(owner, **options), [MeanOutputLoss(2.0)], max_vectorized_clients=size, seed=0)
    assert_same(*tasks, tolerance=1e-5)
