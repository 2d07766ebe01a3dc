"""Tests that the metrics of a module's own `test_step` are recorded and equal the results of hand-written loops."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAccuracy, MultilabelF1Score
from torchmetrics.functional import mean_squared_error, r2_score
from torchmetrics.functional.classification import multilabel_f1_score
from torchmetrics.regression import R2Score

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FedProto, FLwF2T, LogitAdjustment, LwF
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.models import MLP

GROUP = np.arange(96) % 2
X = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32) + GROUP[:, None].astype(np.float32)
LINE = (X @ np.array([1.0, -2.0, 0.5, 1.5], dtype=np.float32)).astype(np.float32)
PAIR = (X[:, 0] > 0.5).astype(np.int64)


class Own(L.LightningModule):
    """A module with one linear layer. Subclasses define `loss`."""

    def __init__(self, outputs=1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, outputs)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneLogit(Own):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def forward(self, x):
        return self.net(x).squeeze(1)

    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

    def test_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])
        self.log_dict({"test_loss": self.loss(batch), "test_accuracy": self.accuracy})


class Line(Own):
    """A regression module that logs its metrics at the end of each validation epoch."""

    def __init__(self):
        super().__init__()
        self.seen, self.r2 = [], R2Score()

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1][:, None])

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append((self(batch[0]), batch[1][:, None]))

    def on_validation_epoch_end(self):
        output, y = (torch.cat(column) for column in zip(*self.seen, strict=True))
        self.log("badness", mean_squared_error(output, y))
        self.r2(output, y)
        self.log("r2", self.r2)


class Items(Dataset):
    """A dataset of dicts, as in torchgeo."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, index):
        return {name: torch.as_tensor(column[index]) for name, column in self.columns.items()}

    def __len__(self):
        return len(X)


class Image(Own):
    """A segmentation module whose `forward` maps dicts to dicts."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 3, 1)

    def forward(self, batch):
        return {"out": self.net(batch["image"])}

    def loss(self, batch):
        return F.cross_entropy(self(batch)["out"], batch["mask"])

    def test_step(self, batch, batch_idx):
        self.log("right", (self(batch)["out"].argmax(1) == batch["mask"]).float().mean())


class Labels(Own):
    """A module for multilabel classification that does not override `forward`."""

    forward = L.LightningModule.forward

    def __init__(self):
        super().__init__(3)
        self.f1 = MultilabelF1Score(3)

    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1].float())

    def test_step(self, batch, batch_idx):
        self.f1.update(self.net(batch[0]), batch[1].long())
        self.log("f1", self.f1)


MASK = (np.random.default_rng(1).random((96, 1, 5, 5)) * 3).astype(np.float32)
IMAGES = Items(image=MASK, mask=MASK[:, 0].astype(np.int64))
MANY = (np.stack([X[:, 0] > 0, X[:, 1] > 0, X[:, 2] > 1], axis=1)).astype(np.float32)


def stream_of(x, y, **kwargs):
    return FederatedStream.from_arrays(
        x, y, scenario=DomainIncremental(), partition=IID(2), group=GROUP, batch_size=7, seed=0, **kwargs
    )


def taken(stream, rows):
    batch = stream.get_samples(rows)
    return batch if isinstance(batch, dict) else tuple(batch)


def losses(module, batch):
    return {
        "test_loss": F.binary_cross_entropy_with_logits(module.net(batch[0])[:, 0], batch[1].float()),
        "test_accuracy": ((module.net(batch[0])[:, 0] > 0) == batch[1]).float().mean(),
    }


def lines(module, batch):
    output, y = module.net(batch[0])[:, 0], batch[1]
    return {"badness": ((output - y) ** 2).mean(), "r2": r2_score(output, y)}


CASES = {
    "one logit": (OneLogit, lambda: stream_of(X, PAIR), losses, {"test_loss": False, "test_accuracy": True}),
    "regression": (Line, lambda: stream_of(X, LINE), lines, {"badness": False, "r2": True}),
    "segmentation": (
        Image,
        lambda: stream_of(IMAGES, None),
        lambda module, batch: {"right": (module.net(batch["image"]).argmax(1) == batch["mask"]).float().mean()},
        {"right": True},
    ),
    "labels": (
        Labels,
        lambda: stream_of(X, MANY, classes=()),
        lambda module, batch: {"f1": multilabel_f1_score(module.net(batch[0]), batch[1].long(), 3)},
        {"f1": True},
    ),
}


@pytest.mark.may(
    "Outputs with one logit, several labels, regression values, masks, dicts or graphs",
    "`ContinualMetrics` reports the values that `test_step` logs. These values equal the values of torchmetrics.",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [None, "auto"])
def test_own_step_logged_metrics_recorded_for_each_group(fit, case, strategy):
    make, make_stream, by_hand, higher = CASES[case]
    stream, module = make_stream(), make()
    metrics = ContinualMetrics(evaluate_on_train=True, lower_is_better=["badness"] if case == "regression" else None)
    if strategy == "auto":
        stream.partition = IID(1)
    trainer = fit(module, stream, [metrics], strategy=strategy)
    record, test = metrics.record, stream.plan.test
    assert record["measures"] == [{"name": name, "higher_is_better": way} for name, way in higher.items()]
    assert record["totals"] == np.bincount(GROUP[test]).tolist() and len(test) > 14
    for part, rows in {"0": GROUP[test] == 0, "1": GROUP[test] == 1, "0+1": test >= 0}.items():
        with torch.no_grad():
            expected = by_hand(module, taken(stream, test[rows]))
        found = {name: values[part] for name, values in record["rounds"][-1]["values"]["server"].items()}
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)
    summary = summarize(record)
    for name, value in found.items():
        assert summary[f"final_{name}/server"] == value and f"forgetting_{name}/server" in summary
        assert trainer.callback_metrics[f"server/{name}"].item() == pytest.approx(value)
        assert f"train_{name}/server" in summary


class Traces(OneLogit):
    """A module whose steps change attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.kept, self.losses = {"outputs": torch.ones(2)}, []
        self.register_buffer("tested", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        assert not self.tested and not hasattr(self, "last") and self.trainer.training
        self.accuracy.update(self(batch[0]) + torch.rand(()), batch[1])
        loss = self.loss(batch)
        # The stored loss keeps its autograd graph, as in many modules of users.
        self.losses.append(loss)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        assert not self.training and not torch.is_grad_enabled() and self.trainer.testing
        self.tested += torch.rand(())
        self.last = self.losses.append(self(batch[0]))
        self.kept["more"] = batch
        self.logger.log_metrics({"in_step": np.random.rand()})


@pytest.mark.may(
    "A module that changes its state in `test_step`", "`ContinualMetrics` restores the state after each evaluation."
)
@pytest.mark.parametrize("strategy", [None, "auto"])
def test_own_step_evaluation_restores_module_state(fit, strategy, tmp_path):
    found = []
    for callbacks in ([], [ContinualMetrics(evaluate_before_fit=True)]):
        module, stream = Traces(), stream_of(X, PAIR)
        stream.partition = IID(1 if strategy else 2)
        words = {"logger": L.loggers.CSVLogger(tmp_path / str(len(callbacks)))}
        trainer = fit(module, stream, callbacks, strategy=strategy, trainer_args=words)
        found.append((module, trainer.callback_metrics["train_accuracy"], torch.rand(1)))
        assert "log" not in vars(module) and "more" not in module.kept
    (left, right), trained, drawn = zip(*found, strict=True)
    assert all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())
    assert trained[0] == trained[1] and torch.equal(*drawn) and len(left.losses) == len(right.losses)
    assert "in_step" not in (tmp_path / "1/lightning_logs/version_0/metrics.csv").read_text()


@pytest.mark.may(
    "Outputs that are logits of the classes", "`ContinualMetrics` measures accuracy and does not call `test_step`."
)
def test_own_step_with_logits_records_accuracy(fit, make_stream):
    class Several(Own):
        def __init__(self):
            super().__init__()
            self.net = MLP([6, 4])

        def loss(self, batch):
            return F.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch, batch_idx):
            raise AssertionError("`test_step` must not be called")

    stream, module, metrics = make_stream(), Several(), ContinualMetrics()
    fit(module, stream, [metrics])
    x, y = stream.get_samples(stream.plan.test)
    right = (module(x).argmax(1) == y).numpy()
    assert metrics.record["rounds"][-1]["correct"]["server"] == np.bincount(y[right], minlength=4).tolist()
    with raises(InvalidValueError, "lower_is_better"):
        fit(module, stream, [ContinualMetrics(lower_is_better=["loss"])])


def test_own_step_numbers_reduced_as_in_lightning(fit, quiet):
    class Numbers(OneLogit):
        def test_step(self, batch, batch_idx):
            x = batch[0]
            self.log("mean", x.mean(), on_step=True)
            self.log("weighted", x.mean(), batch_size=batch_idx + 1, on_epoch=True)
            for how in ("sum", "min", "max"):
                self.log(how, x[:, 0].sum(), reduce_fx=how)
            self.log("step", 1.0, on_step=True, on_epoch=False)

        def on_test_epoch_end(self):
            self.log("end", 3)

    stream, module, metrics = stream_of(X, PAIR), Numbers(), ContinualMetrics(clients="none")
    fit(module, stream, [metrics], max_epochs=1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*stream.get_samples(stream.plan.test)), batch_size=7
    )
    (lightning,) = L.Trainer(**quiet).test(module, loader, verbose=False)
    values = {n: v["0+1"] for n, v in metrics.record["rounds"][0]["values"]["server"].items()}
    assert set(values) == {"mean", "weighted", "sum", "min", "max", "end"}
    assert values == pytest.approx({n: lightning["mean_epoch" if n == "mean" else n] for n in values}, rel=1e-5)


def test_own_step_resumed_fit_records_same_values(fit, tmp_path):
    records = []
    for cut in (None, 1):
        metrics, path = ContinualMetrics(), None
        if cut:
            path = tmp_path / "round.ckpt"
            fit(OneLogit(), stream_of(X, PAIR), [ContinualMetrics()], max_epochs=cut).save_checkpoint(path)
        fit(OneLogit(), stream_of(X, PAIR), [metrics], ckpt_path=path)
        records.append([entry["values"] for entry in metrics.record["rounds"]])
    assert records[0] == records[1] and len(records[0]) == 2


def test_own_step_failing_on_one_class_records_none(fit):
    """If the step fails on one class, no value is recorded for this class.

    If the step fails on all samples, the error is raised.
    """

    class Picky(OneLogit):
        def test_step(self, batch, batch_idx):
            if len(batch[1].unique()) < 2:
                raise ValueError("one class only")
            self.log("loss", self.loss(batch))

    stream = FederatedStream.from_arrays(X, PAIR, scenario=ClassIncremental(2), partition=IID(2), seed=0)
    metrics = ContinualMetrics()
    fit(Picky(), stream, [metrics])
    values = metrics.record["rounds"][-1]["values"]["server"]["loss"]
    assert values["0"] is None and values["1"] is None and values["0+1"] > 0
    assert "final_loss/server" in summarize(metrics.record)
    with pytest.raises(ValueError, match="one class only"):
        fit(Picky(), stream_of(X, np.zeros(96, dtype=np.int64)), [ContinualMetrics()])


class NoStep(Own):
    def loss(self, batch):
        raise AssertionError("Expected an error before the first round, but a training step was called.")


class Silent(NoStep):
    def test_step(self, batch, batch_idx):
        pass


class Vector(NoStep):
    def test_step(self, batch, batch_idx):
        self.log("all", torch.zeros(3))


class Features(OneLogit):
    lightning_fcl_protocols = True
    num_classes, features = 2, 4

    def embed(self, x):
        return x


class Pair(Classifier):
    """A subclass of the library's `Classifier` whose network has one logit."""

    def __init__(self):
        super().__init__(nn.Linear(4, 1), 2)

    def sample_loss(self, output, y):
        raise AssertionError("Expected an error before the first round, but `sample_loss` was called.")


class Dicts(NoStep):
    def forward(self, x):
        return {"out": self.net(x)}


REFUSED = {
    "no step": (NoStep, [], (InvalidValueError, "NoStep")),
    "dicts": (Dicts, [], (InvalidValueError, "Dicts")),
    "ours": (Pair, [], (InvalidValueError, "Pair")),
    "silent": (Silent, [], (InvalidValueError, "Silent.test_step")),
    "vector": (Vector, [], (InvalidValueError, "all")),
    "unknown": (OneLogit, ["lost"], (UnknownNameError, "lower_is_better")),
    "a rule": (Features, [FedProto()], (InvalidValueError, "Features")),
    "one logit": (OneLogit, [LwF()], (InvalidValueError, "forward")),
    "dict of logits": (Dicts, [FLwF2T()], (InvalidValueError, "forward")),
    "adjusted": (OneLogit, [LogitAdjustment()], (InvalidValueError, "forward")),
}  # fmt: skip


@pytest.mark.may(
    "A module without a metric, or with an incompatible method or metric",
    "Not supported. The error before the first round says what to define.",
)
@pytest.mark.parametrize("case", REFUSED)
def test_own_step_unmeasurable_module_raises_before_first_round(fit, case):
    make, more, expected = REFUSED[case]
    methods = [one for one in more if not isinstance(one, str)]
    names = [one for one in more if isinstance(one, str)] or None
    callbacks = [*methods, ContinualMetrics(lower_is_better=names)]
    with raises(*expected):
        fit(make(), stream_of(X, PAIR), callbacks)


def test_method_with_batches_of_dicts_raises_about_forward(fit):
    with raises(InvalidValueError, "forward"):
        fit(Image(), stream_of(IMAGES, None), [FLwF2T()])


def test_own_step_of_classifier_subclass_is_recorded(fit):
    class Mine(Pair):
        def sample_loss(self, output, y):
            return F.binary_cross_entropy_with_logits(output[:, 0], y.float(), reduction="none")

        def test_step(self, batch, batch_idx):
            self.log("loss", self.sample_loss(self(batch[0]), batch[1]).mean())

    stream, module, metrics = stream_of(X, PAIR), Mine(), ContinualMetrics()
    fit(module, stream, [metrics])
    with torch.no_grad():
        x, y = stream.get_samples(stream.plan.test)
        expected = module.sample_loss(module(x), y).mean()
    assert metrics.record["rounds"][-1]["values"]["server"]["loss"]["0+1"] == pytest.approx(float(expected))
