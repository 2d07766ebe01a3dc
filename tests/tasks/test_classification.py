"""Tests of task-incremental classifiers: logits are restricted to the classes of a sample's task."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStream, MajorityClassifier
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.models import MLP
from lightning_fcl.tasks.classification import Regressor


def make_tasks(num_clients=2, seed=0):
    rng = np.random.default_rng(3)
    y = np.repeat(np.arange(6), 40)
    x = (rng.normal(size=(240, 5)) + np.eye(6, 5)[y]).astype(np.float32)
    arguments = {
        "num_tasks": 3,
        "num_clients": num_clients,
        "classes_per_client": (2, 2),
        "sample_fraction": (0.5, 0.5),
        "rounds_per_task": 2,
    }
    data = ArrayDataset(x, y, None, tuple("abcdef"))
    return FederatedStream(data, scenario=FedViTScenario(**arguments), split=Split(test=0.25), batch_size=4, seed=seed)


def make_task(lr=0.1, **kwargs):
    torch.manual_seed(0)
    model = MLP([5, 7, 6])
    return Classifier(model, 6, lambda params: torch.optim.SGD(params, lr=lr), **kwargs)


def blocks_of(stream):
    """Return a dict that maps each class to the classes of its task."""
    blocks = [[*stream.plan.classes_of_task("0", task)] for task in range(3)]
    return {label: block for block in blocks for label in block}


@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_task_incremental_changes_only_rows_of_the_task(fit, max_vectorized_clients):
    task, stream = make_task(task_incremental=True), make_tasks(num_clients=2)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    fit(task, stream, max_epochs=2, max_vectorized_clients=max_vectorized_clients)
    seen = sorted({c for client in stream.plan.clients for c in stream.plan.classes_of_task(client, 0)})
    others = [c for c in range(6) if c not in seen]
    assert others
    for name in ("model.3.weight", "model.3.bias"):
        after = task.state_dict()[name]
        assert torch.equal(after[others], before[name][others])
        assert not torch.equal(after[seen], before[name][seen])


def test_task_incremental_loss_equals_loss_of_sliced_logits(fit):
    task, stream = make_task(task_incremental=True), make_tasks(num_clients=1)
    fit(task, stream, max_epochs=1)
    output, y = torch.randn(30, 6, requires_grad=True), torch.arange(30) % 6
    blocks = blocks_of(stream)
    sliced = [
        F.cross_entropy(output[i, blocks[int(c)]], torch.tensor(blocks[int(c)].index(int(c)))) for i, c in enumerate(y)
    ]
    ours = task.sample_loss(output, y)
    torch.testing.assert_close(ours, torch.stack(sliced))
    gradient = torch.autograd.grad(ours.sum(), output)[0]
    assert torch.isfinite(gradient).all()
    assert all((gradient[i, [c for c in range(6) if c not in blocks[int(k)]]] == 0).all() for i, k in enumerate(y))


def test_task_incremental_accuracy_is_within_the_task(fit):
    task, stream, metrics = make_task(task_incremental=True), make_tasks(num_clients=1), ContinualMetrics()
    fit(task, stream, [metrics], max_epochs=1)
    x, y = stream.get_samples(stream.plan.test)
    blocks = blocks_of(stream)
    with torch.no_grad():
        logits = task(x)
    right = [blocks[int(c)][int(logits[i, blocks[int(c)]].argmax())] == int(c) for i, c in enumerate(y)]
    assert sum(metrics.record["rounds"][0]["correct"]["server"]) == sum(right)
    assert sum(right) != int((logits.argmax(dim=1) == y).sum())


def test_task_incremental_stream_without_tasks_raises(fit, make_stream):
    with raises(InvalidValueError, "task_incremental"):
        fit(Classifier(MLP([6, 5, 4]), 4, task_incremental=True), make_stream())


@pytest.mark.parametrize("task_incremental", [True, False])
def test_classifier_stream_with_more_classes_raises(fit, task_incremental):
    task = Classifier(MLP([5, 7, 4]), 4, task_incremental=task_incremental)
    with raises(InvalidValueError, "num_classes"):
        fit(task, make_tasks())


@pytest.mark.parametrize("outputs", [6, 18])
def test_classifier_wrong_number_of_outputs_raises(fit, make_stream, quiet, outputs):
    task = Classifier(nn.Linear(6, outputs), num_classes=12)
    with raises(InvalidValueError, "num_classes"):
        fit(task, make_stream())
    with raises(InvalidValueError, "num_classes"):
        L.Trainer(**quiet).test(task, DataLoader(TensorDataset(torch.zeros(4, 6), torch.arange(4)), 2), verbose=False)


@pytest.mark.parametrize("task_incremental", [True, False])
def test_classifier_predict_returns_logits(fit, quiet, task_incremental):
    task, stream = make_task(task_incremental=task_incremental), make_tasks()
    stream.setup("fit")
    x, y = stream.get_samples(stream.plan.test)
    pairs, alone = DataLoader(TensorDataset(x, y), 7), DataLoader(x, 7)
    with torch.no_grad():
        expected = task(x)
    # Predictions work before any fit.
    torch.testing.assert_close(torch.cat(L.Trainer(**quiet).predict(task, alone)), expected)
    trainer = fit(task, stream, max_epochs=2)
    with torch.no_grad():
        expected = task.eval()(x)
    for predict in (
        lambda: trainer.predict(task, datamodule=stream),
        lambda: trainer.predict(task, pairs),
        lambda: L.Trainer(**quiet).predict(task, pairs),
        lambda: L.Trainer(**quiet).predict(task, alone),
    ):
        torch.testing.assert_close(torch.cat(predict()), expected)


def test_task_incremental_test_in_plain_trainer_equals_federated(fit, quiet):
    task, stream = make_task(task_incremental=True), make_tasks()
    trainer = fit(task, stream)
    x, y = stream.get_samples(stream.plan.test)
    plain = L.Trainer(**quiet).test(task, DataLoader(TensorDataset(x, y), 7), verbose=False)
    (told,) = trainer.test(task, datamodule=stream, verbose=False)
    assert plain[0] == pytest.approx(told)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=-1.0),
        lambda parameters: torch.optim.SGD(parameters, momentum=None),
        lambda parameters: [*parameters],
    ],
)
def test_configure_optimizers_invalid_optimizer_raises(optimizer):
    with raises(InvalidValueError, "optimizer"):
        Classifier(MLP([4, 2]), 2, optimizer).configure_optimizers()
    with raises(InvalidValueError, "optimizer"):
        Regressor(MLP([4, 2]), 2, optimizer).configure_optimizers()


def test_majority_classifier_accuracy_equals_share_of_class(fit):
    """The accuracy on a task is the share of a client's most frequent class among the test samples of the task."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 12
    scenario = FedViTScenario(
        num_tasks=2, num_clients=4, classes_per_client=(2, 5), sample_fraction=(0.3, 0.6), rounds_per_task=2
    )
    x = rng.normal(size=(240, 6)).astype(np.float32)
    stream = FederatedStream.from_arrays(x, y, scenario=scenario, batch_size=8, seed=0)
    metrics, task = ContinualMetrics(when="both"), MajorityClassifier(12, task_incremental=True)
    fit(task, stream, [metrics], reductions={"class_counts": "local"})
    summary, totals = summarize(metrics.record), np.array(metrics.record["totals"])
    for client in stream.plan.clients:
        accuracies = []
        for number, groups in enumerate(stream.plan.tasks[client]):
            own = np.bincount(y[stream.plan.train[2 * number][client]], minlength=12)
            accuracies.append(totals[own.argmax()] / totals[list(groups)].sum())
        assert summary[f"average_accuracy/{client}"] == pytest.approx(np.mean(accuracies))
        assert summary[f"average_accuracy_local/{client}"] == pytest.approx(np.mean(accuracies))
        assert summary[f"forgetting/{client}"] == 0
    assert 0.2 < summary["average_accuracy/clients"] < 0.5
