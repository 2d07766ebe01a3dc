"""Table of hints in the error messages of callbacks."""

from types import SimpleNamespace

import lightning.pytorch as L
import torch
from fixes import (
    Items,
    Logs,
    Row,
    fit_one_round,
    has_rounds,
    sgd,
    stream_of_arrays,
)
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl import Classifier, FederatedStream, Regressor, RidgeClassifier
from lightning_fcl.callbacks import (
    BaseSession,
    ContinualMetrics,
    ICaRL,
    PredictionWriter,
    Replay,
    ServerWeightAveraging,
)
from lightning_fcl.callbacks.round_log import EpochLog, RoundLog
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.data.scenarios.papers import ODFCLScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, MissingValueError
from lightning_fcl.methods.method import Method
from lightning_fcl.models import MLP, DSICNet

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def check_session(lab, classes=6, size=16, before=(), head=None, latents=False):
    x, y = torch.randn(80, 1, 16, 16), torch.arange(80) % 8
    scenario = ODFCLScenario(
        num_people=6, num_base_people=2, num_sessions=2, num_nodes=2, train_per_class=7, test_per_class=3
    )
    stream = stream_of_arrays(lab, x, y, scenario=scenario, partition=None)
    network = DSICNet(classes, (size, size))
    if head is not None:
        network.head.classifier = head
    task = Classifier(network, classes, sgd)
    assert BaseSession(precompute_latents=latents).check_stream(task, before, stream) is stream


def fit_in_order(lab, callbacks):
    trainer = L.Trainer(max_epochs=1, callbacks=callbacks, **lab.quiet)
    trainer.fit(lab.task(), datamodule=lab.stream(num_clients=1))
    return has_rounds(trainer)


class LogsMetric(L.LightningModule):
    """A module that logs a metric. With `is_attribute`, the metric is an attribute of the module."""

    def __init__(self, is_attribute):
        super().__init__()
        metric = MulticlassAccuracy(4)
        if is_attribute:
            self.metric = metric
        self.find = lambda: metric
        self.log = lambda *args, **kwargs: None


def log_metric(lab, is_attribute):
    module = LogsMetric(is_attribute)
    logs = RoundLog(module, SimpleNamespace(num_ranks=2, rank=0))
    logs.start_batch(torch.zeros(2))
    module.log("accuracy", module.find(), on_step=False, on_epoch=True)


def log_numbers(lab, values):
    log = EpochLog()
    for name, value in values.items():
        log(name, value, on_epoch=True)
    assert {name: log.value(name) for name in values} == {"a": 1.0, "b": 2.0}


class AnyRegressor(Regressor):
    """A regressor whose batches can be pairs or dicts."""

    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(self(x), y)


def numbers_of_dict(index):
    return {"x": torch.ones(6) * index, "y": torch.ones(1) * index}


def numbers_of_pair(index):
    return torch.ones(6) * index, torch.ones(1) * index


def measure_items(lab, make):
    stream = FederatedStream(Items(make), Stationary(), partition=IID(2), split=Split(test=0.25), batch_size=6)
    return fit_one_round(lab, stream, AnyRegressor(MLP([6, 5, 1]), 1, sgd), callbacks=[ContinualMetrics()])


def fit_regressor(lab, callbacks):
    stream = FederatedStream(Items(numbers_of_pair), Stationary(), partition=IID(2), split=Split(test=0.25))
    return fit_one_round(lab, stream, Regressor(MLP([6, 5, 1]), 1, sgd), callbacks=callbacks)


class Rule(Method):
    """A method with its own prediction rule."""

    def rescore(self, server, module, x, output):
        return output


class GrowingHead(Classifier):
    """A classifier whose head grows in the second round."""

    def on_train_epoch_start(self):
        if self.current_epoch:
            self.model, self.num_classes = nn.Linear(6, 5), 5
            self.optimizers().param_groups[0]["params"] = [*self.parameters()]


def fit_averages(lab, decays, task=None, reductions=None, methods=()):
    callbacks = [*methods, *(ServerWeightAveraging(decay) for decay in decays)]
    task = RidgeClassifier(MLP([6, 5, 4]), 4) if task == "ridge" else task
    module = lab.task() if task is None else GrowingHead(nn.Linear(6, 4), 4, sgd) if task == "growing" else task
    stream = lab.stream(num_experiences=1, rounds_per_experience=2)
    return has_rounds(lab.fit(module, stream, callbacks, reductions=reductions), 2)


ROWS |= {
    "average with a decay of 1": Row(
        fit_averages, {"decays": [1.0]}, {"decays": [0.9]}, "Use for example `decay=0.9`", argument="decay"
    ),
    "average with a negative decay": Row(
        fit_averages, {"decays": [-0.5]}, {"decays": [None]}, "or `decay=None` for equal weights of all rounds."
    ),
    "equal weights of a growing head": Row(
        fit_averages,
        {"decays": [None], "task": "growing"},
        {"decays": [0.9]},
        "Use an exponential moving average, for example `decay=0.9`.",
    ),
    "two averages": Row(fit_averages, {"decays": [0.9, 0.5]}, {"decays": [0.9]}, "Remove the others."),
    "average of a ridge regression": Row(
        fit_averages, {"decays": [0.9], "task": "ridge"}, {"decays": []}, "Remove `ServerWeightAveraging`."
    ),
    "average with class means of features": Row(
        fit_averages,
        {"decays": [0.9], "methods": [ICaRL(12)]},
        {"decays": []},
        "Remove `ServerWeightAveraging` or `ICaRL`.",
    ),
    "average of client-local tensors": Row(
        fit_averages,
        {"decays": [0.9], "reductions": {"*": "local"}},
        {"reductions": None},
        "or remove `reductions` of the strategy.",
    ),
    "base session of a network with few outputs": Row(
        check_session, {"classes": 4}, {"classes": 6}, "Increase the network's `num_classes`."
    ),
    "base session of a network for larger images": Row(
        check_session,
        {"size": 24},
        {"size": 16},
        "Set the network's `image_size` and `channels`, or the dataset's `size`.",
    ),
    "replay before the base session": Row(
        check_session,
        {"latents": True, "before": [Replay(8, include_base=True)]},
        {"before": []},
        "Put `Replay` after `BaseSession` in `callbacks`.",
    ),
    "base session of a network without a classifier": Row(
        check_session,
        {"head": nn.Sequential(nn.Linear(80, 6))},
        {"head": nn.Linear(80, 6)},
        "Assign the last layer to `model.head.classifier`.",
    ),
    "metrics before a method that predicts": Row(
        fit_in_order,
        {"callbacks": [ContinualMetrics(), ICaRL(12)]},
        {"callbacks": [ICaRL(12), ContinualMetrics()]},
        "Put `ContinualMetrics` after `ICaRL` in `callbacks`.",
    ),
    "log of a metric that is no attribute": Row(
        log_metric,
        {"is_attribute": False},
        {"is_attribute": True},
        "Assign the metric to an attribute in `__init__`.",
        MissingValueError,
    ),
    "log of several numbers": Row(
        log_numbers,
        {"values": {"a": torch.tensor([1.0, 2.0])}},
        {"values": {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}},
        "Log each number under its own name.",
    ),
    "metrics of samples that are dicts": Row(
        measure_items,
        {"make": numbers_of_dict},
        {"make": numbers_of_pair},
        "Return pairs from the dataset, or use a module whose `forward` does not return logits, and log metrics in its "
        "`test_step`.",
        InvalidTypeError,
    ),
    "predictions of a regressor": Row(
        fit_regressor,
        {"callbacks": [PredictionWriter()]},
        {"callbacks": []},
        "Remove `PredictionWriter` from the callbacks, or `--predictions` from the command.",
        argument="module",
    ),
    "metrics of a step beside a method that predicts": Row(
        lambda lab, callbacks: fit_one_round(lab, task=Logs(True), callbacks=[*callbacks, ContinualMetrics()]),
        {"callbacks": [Rule()]},
        {"callbacks": []},
        "Remove `Rule`, because the step of `Logs` does not use the predictions of `Rule`.",
    ),
}
