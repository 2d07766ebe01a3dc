"""Tests of torchmetrics metrics that a classifier configures in place of accuracy."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torch import nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.callbacks.metric_values import compute_metric
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.evaluation.metrics import summarize


class Measured(Classifier):
    """A classifier with weighted classes, measured by metrics for rare classes."""

    def configure_metrics(self):
        classes = self.num_classes
        return {
            "balanced_accuracy": MulticlassAccuracy(classes),
            "AUROC": MulticlassAUROC(classes),
            "macro_F1": MulticlassF1Score(classes),
        }

    def sample_loss(self, output, y):
        weight = torch.arange(1.0, 1 + self.num_classes)
        return nn.functional.cross_entropy(output, y, weight=weight, reduction="none")


def measured_task():
    return Measured(nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), 4)


def by_scikit_learn(logits, y):
    shares, predictions = logits.softmax(dim=1).numpy(), logits.argmax(dim=1).numpy()
    return {
        "balanced_accuracy": balanced_accuracy_score(y, predictions),
        "AUROC": roc_auc_score(y, shares, multi_class="ovr"),
        "macro_F1": f1_score(y, predictions, average="macro"),
    }


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_classifier_configured_metrics_equal_scikit_learn(fit, make_stream, max_vectorized_clients):
    task, stream, metrics = measured_task(), make_stream(), ContinualMetrics()
    trainer = fit(task, stream, [metrics], max_vectorized_clients=max_vectorized_clients)
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        expected = by_scikit_learn(task(x), y.numpy())
    summary = summarize(metrics.record)
    last = metrics.record["rounds"][-1]["values"]["server"]
    for name, value in expected.items():
        assert summary[f"final_{name}/server"] == pytest.approx(value, rel=1e-5)
        assert last[name]["0+1+2+3"] == pytest.approx(value, rel=1e-5)
        assert trainer.callback_metrics[f"server/{name}"].item() == pytest.approx(value, rel=1e-5)
    # A single class has no AUROC.
    assert last["AUROC"]["0"] is None and last["balanced_accuracy"]["0"] is not None


def test_classifier_configured_metrics_are_logged_in_tests(fit, make_stream):
    task, stream = measured_task(), make_stream(scenario=ClassIncremental(1))
    trainer = fit(task, stream)
    (found,) = trainer.test(task, datamodule=stream, verbose=False)
    x, y = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        expected = by_scikit_learn(task(x), y.numpy())
    assert {name: found[f"test/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert "test/accuracy" in found


def test_compute_metric_single_logit_equals_scikit_learn():
    logits, labels = torch.randn(50, 1), torch.arange(50) % 2
    assert compute_metric(BinaryAUROC(), logits, labels, True) == pytest.approx(
        roc_auc_score(labels.numpy(), logits[:, 0].numpy())
    )
    assert compute_metric(BinaryAUROC(), logits, torch.ones(50, dtype=torch.long), True) is None


def test_compute_metric_time_steps_share_label_of_sample():
    logits, labels = torch.randn(12, 5, 3), torch.arange(12) % 3
    found = compute_metric(MulticlassAccuracy(3), logits, labels, True)
    steps = np.repeat(labels.numpy(), 5)
    assert found == pytest.approx(balanced_accuracy_score(steps, logits.argmax(dim=-1).flatten().numpy()))


def test_compute_metric_numbers_have_shape_of_outputs():
    outputs, targets = torch.randn(8, 1), torch.arange(8)
    found = compute_metric(MeanSquaredError(), outputs, targets, False)
    assert found == pytest.approx(float((outputs[:, 0] - targets).square().mean()), rel=1e-6)


def test_classifier_client_with_one_class_trains_and_is_measured(fit):
    x, y = torch.randn(96, 6), torch.arange(96) % 4
    owner = np.where(y.numpy() == 2, "single", np.where(np.arange(96) < 48, "first", "second"))
    stream = FederatedStream.from_arrays(x, y, client_ids=owner, scenario=Stationary(), seed=0)
    metrics = ContinualMetrics()
    trainer = fit(measured_task(), stream, [metrics])
    (last,) = metrics.record["rounds"]
    assert not trainer.strategy.server.record.dropped
    assert last["values"]["single"]["balanced_accuracy"]["0+1+2+3"] is not None
