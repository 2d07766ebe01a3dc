"""Tests of common uses of a Trainer in a federation, with the bundled digits."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.tuner import Tuner
from raising import raises
from torch import nn

import lightning_fcl
from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import MLP


class Net(Classifier):
    """A classifier with a body and a head. Only the head is in the optimizer. The learning rate is an attribute."""

    def __init__(self, interval="epoch"):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        super().__init__(nn.Sequential(body, nn.Linear(16, 10)), 10)
        self.lr, self.interval = 0.1, interval

    @property
    def backbone(self):
        return self.model[0]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model[1].parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.fixture
def stream():
    """Return a stream of three clients and two experiences of two rounds, with validation samples."""
    scenario, split = ClassIncremental(2, rounds_per_experience=2), Split(test=0.2, validation=0.2)
    return FederatedStream("digits", scenario, IID(3), split, batch_size=64, seed=0)


@pytest.fixture
def task():
    """Return a classifier with a small network."""
    torch.manual_seed(0)
    return Classifier(MLP([64, 16, 10]), 10, torch.optim.SGD)


def column(folder, name):
    """Return the values of a column that a CSVLogger has written."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.argument("logger", "Supported. Logs the values of the server and of the clients, [by round](loggers.md).")
def test_csv_logger_has_metrics_rates_and_hyperparameters(fit, stream, task, tmp_path):
    logger = CSVLogger(tmp_path, "", "")
    trainer = fit(task, stream, [ContinualMetrics(), LearningRateMonitor()],
                  trainer_args={"logger": logger, "log_every_n_steps": 1})  # fmt: skip
    for name in ("clients/accuracy_mean", "clients/train_loss_max", "server/accuracy", "train/loss", "val/accuracy"):
        assert len(column(tmp_path, name)) == 4, name
    # 0.001 is PyTorch's default learning rate of SGD.
    assert set(column(tmp_path, "lr-SGD")) == {0.001}
    hparams = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    arguments = {"sizes": [64, 16, 10], "batch_norm": False}
    assert hparams["model"] == {"class_path": "lightning_fcl.models.MLP", "init_args": arguments}
    assert hparams["optimizer"]["class_path"].endswith("SGD") and hparams["num_classes"] == 10
    assert column(tmp_path, "server/accuracy")[-1] == pytest.approx(float(trainer.callback_metrics["server/accuracy"]))


@pytest.mark.callback(
    "LearningRateMonitor", "Supported. Logs the learning rate of each round or of each client's steps."
)
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_learning_rate_monitor_logs_rates_by_round_or_by_client_step(fit, stream, tmp_path, max_vectorized_clients):
    for interval in ("epoch", "step"):
        logger = CSVLogger(tmp_path / interval, "", "")
        fit(Net(interval), stream, [LearningRateMonitor(interval)], max_vectorized_clients=max_vectorized_clients,
            trainer_args={"logger": logger, "log_every_n_steps": 1})  # fmt: skip
    assert column(tmp_path / "epoch", "lr-SGD") == [0.1, 0.05, 0.025, 0.0125]
    steps = column(tmp_path / "step", "lr-SGD")
    assert steps[:4] == [0.1, 0.05, 0.025, 0.0125]
    # Each client, or each group of three vectorized clients, starts with the initial learning rate.
    assert steps.count(0.1) == (4 if max_vectorized_clients == "auto" else 12)


def test_validate_test_and_predict_use_the_server_model(fit, stream, task, quiet):
    trainer = fit(task, stream)
    (validated,), (tested,) = (run(task, datamodule=stream, verbose=False) for run in (trainer.validate, trainer.test))
    predicted = torch.cat(trainer.predict(task, datamodule=stream))
    x, y = stream.get_samples(stream.plan.test)
    assert predicted.shape == (len(y), 10)
    assert tested["test/accuracy"] == pytest.approx(float((predicted.argmax(1) == y).float().mean()))
    x, y = stream.get_samples(stream.plan.validation)
    assert validated["val/accuracy"] == pytest.approx(float((task.eval()(x).argmax(1) == y).float().mean()))
    (before,) = L.Trainer(strategy=FederatedStrategy(), **quiet).test(task, datamodule=stream, verbose=False)
    assert before == tested  # This Trainer has never fitted.


@pytest.mark.callback("BasePredictionWriter", "Supported. Writes the predictions of the server's model.")
def test_prediction_writer_gets_all_test_samples(fit, stream, task):
    written = []

    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            written.extend(len(batch) for batch in predictions)

    trainer = fit(task, stream, [Writer("epoch")])
    trainer.predict(task, datamodule=stream, return_predictions=False)
    assert sum(written) == len(stream.plan.test)


@pytest.mark.callback(
    "ModelCheckpoint", "Supported. `every_n_epochs` counts rounds, and `monitor` is a metric of a round."
)
@pytest.mark.parametrize("monitor", ["val/accuracy", "server/accuracy"])
def test_model_checkpoint_keeps_the_best_round(fit, stream, task, tmp_path, monitor):
    logger = CSVLogger(tmp_path, "", "")
    keep = ModelCheckpoint(tmp_path, "{epoch}", monitor=monitor, mode="max")
    trainer = fit(task, stream, [keep, ContinualMetrics()],
                  trainer_args={"enable_checkpointing": True, "logger": logger})  # fmt: skip
    found = column(tmp_path, monitor)
    assert float(keep.best_model_score) == pytest.approx(max(found))
    assert Path(keep.best_model_path).stem == f"epoch={found.index(max(found))}"
    (tested,) = trainer.test(ckpt_path="best", datamodule=stream, verbose=False)
    if monitor == "server/accuracy":
        assert tested["test/accuracy"] == pytest.approx(max(found))


@pytest.mark.callback("EarlyStopping", "Supported. `patience` counts rounds.")
def test_early_stopping_stops_after_a_round(fit, stream, task):
    stop = EarlyStopping("server/accuracy", mode="max", patience=0, min_delta=1)
    trainer = fit(task, stream, [ContinualMetrics(), stop])
    assert trainer.current_epoch == 2 and trainer.strategy.current_round.settled


@pytest.mark.parametrize("groups", ["head", "head first"])
def test_optimizer_of_reordered_parameters_vectorized_is_equal(fit, stream, assert_same, groups):
    """The layers have weights of the same shape, so gradients in the wrong order would not raise an error."""

    class Ordered(Classifier):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), 64)

        def configure_optimizers(self):
            body, head = self.model[1], self.model[3]
            several = [{"params": head.parameters(), "lr": 0.2}, {"params": body.parameters(), "lr": 0.01}]
            return torch.optim.SGD(several if groups == "head first" else head.parameters(), lr=0.1)

    one, together, start = Ordered(), Ordered(), Ordered()
    fit(one, stream, max_vectorized_clients=1, max_epochs=2)
    fit(together, stream, max_vectorized_clients=3, max_epochs=2)
    assert_same(one, together, 1e-5)
    assert torch.equal(together.model[1].weight, start.model[1].weight) == (groups == "head")


@pytest.mark.callback("BackboneFinetuning", "Supported. All clients train the backbone from the given round on.")
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_backbone_finetuning_unfreezes_at_a_round(fit, stream, max_vectorized_clients):
    task, seen = Net(), []

    class Watch(L.Callback):
        def on_round_end(self, trainer, pl_module):
            seen.append(pl_module.backbone[1].weight.clone())

    start = task.backbone[1].weight.clone()
    fit(task, stream, [BackboneFinetuning(2), Watch()], max_vectorized_clients=max_vectorized_clients)
    assert torch.equal(seen[0], start) and torch.equal(seen[1], start)
    assert not torch.equal(seen[2], seen[1]) and not torch.equal(seen[3], seen[2])


@pytest.mark.parametrize(
    ("search", "callback"), [("lr_find", "LearningRateFinder"), ("scale_batch_size", "BatchSizeFinder")]
)
def test_tuner_raises_with_name_of_its_callback(stream, quiet, tmp_path, search, callback):
    trainer = L.Trainer(strategy="federated", max_epochs=4, default_root_dir=tmp_path, **quiet)
    with raises(InvalidValueError, "callbacks", value=callback):
        getattr(Tuner(trainer), search)(Net(), datamodule=stream)


@pytest.mark.argument("max_epochs", "Supported. Number of rounds. Default, or -1: the number of rounds of the stream.")
@pytest.mark.parametrize("unset", [{}, {"max_epochs": -1}])
def test_max_epochs_unset_trains_all_rounds_of_the_stream(stream, task, quiet, recwarn, unset):
    class Scheduled(Net):
        def configure_optimizers(self):
            self.rounds = self.trainer.max_epochs
            return super().configure_optimizers()

    net, trainer = Scheduled(), L.Trainer(strategy="federated", **unset, **quiet)
    before = trainer.max_epochs
    trainer.fit(net, datamodule=stream)
    assert trainer.current_epoch == net.rounds == stream.plan.num_rounds == 4
    assert before in (None, trainer.max_epochs) and trainer.max_epochs in (-1, 1000)
    assert not [one for one in recwarn if "max_epochs" in str(one.message)]
    longer = FederatedStream("digits", ClassIncremental(2, rounds_per_experience=3), IID(3), batch_size=64, seed=0)
    trainer.fit(net, datamodule=longer)  # The fit continues up to the last round of the new stream.
    assert trainer.current_epoch == net.rounds == 6


class Steps(L.Callback):
    """Stores the sum of each sample's features. The sums are grouped by batch, client and round."""

    def __init__(self):
        self.by_client = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        part = trainer.strategy.current_client_round
        self.by_client.setdefault((part.round_idx, part.client_id), []).append(batch[0].flatten(1).sum(1).tolist())


LIMITS = [
    ({"limit_train_batches": 1}, lambda batches: 1),
    ({"limit_train_batches": 3}, lambda batches: min(3, batches)),
    ({"limit_train_batches": 0.5}, lambda batches: max(1, batches // 2)),
    ({"limit_train_batches": 0.01}, lambda batches: 1),
    ({"overfit_batches": 2}, lambda batches: min(2, batches)),
    ({"fast_dev_run": 2}, lambda batches: min(2, batches)),
]


@pytest.mark.argument(
    "limit_train_batches",
    "Supported. Limits the batches of each client in a round. A fraction gives at least one batch.",
)
@pytest.mark.argument(
    "overfit_batches", "Supported. Number of batches of each client in a round. Each round uses the same batches."
)
@pytest.mark.argument("fast_dev_run", "Supported. Trains one round with this number of batches per client.")
@pytest.mark.parametrize(("arguments", "expected"), LIMITS)
def test_limits_of_batches_apply_to_each_client(fit, stream, assert_same, arguments, expected):
    tasks = [Net(), Net()]
    everything, limited = Steps(), Steps()
    rounds = 1 if "fast_dev_run" in arguments else 4
    fit(Net(), stream, [everything], max_vectorized_clients=1, local_epochs=2, max_epochs=rounds)
    trainer = fit(tasks[0], stream, [limited], max_vectorized_clients=1, local_epochs=2, trainer_args=arguments)
    fit(tasks[1], stream, max_vectorized_clients=3, local_epochs=2, trainer_args=arguments)
    assert_same(*tasks, 1e-5)
    assert limited.by_client.keys() == everything.by_client.keys()
    assert {part[0] for part in limited.by_client} == set(range(rounds))
    for part, batches in everything.by_client.items():
        kept = limited.by_client[part]
        assert len(kept) == expected(len(batches))
        if "overfit_batches" not in arguments:
            assert kept == batches[: len(kept)]
    # `overfit_batches` disables shuffling, so each round of an experience has the same batches.
    if "overfit_batches" in arguments:
        assert limited.by_client[0, "0"] == limited.by_client[1, "0"]
    assert {client for _, client in limited.by_client} == {*trainer.strategy.server.record.accepted}
    given = arguments.get("limit_train_batches", arguments.get("overfit_batches", arguments.get("fast_dev_run")))
    assert trainer.limit_train_batches == given and type(trainer.limit_train_batches) is type(given)


class Uploads(L.Callback):
    """Stores the uploaded head of each client of a round, and computes the weighted means of the heads."""

    def __init__(self):
        self.states, self.samples = [], []

    def on_client_end(self, trainer, pl_module, client_round):
        self.states.append(pl_module.model[1].weight.detach().double())
        self.samples.append(client_round.num_samples)

    def mean(self, weights):
        return sum(w * state for w, state in zip(weights, self.states, strict=True)) / sum(weights)


@pytest.mark.parametrize("weights", ["samples", "trained_samples", "uniform"])
def test_client_weights_do_not_depend_on_limit_train_batches(fit, weights):
    # The two clients have 40 and 24 samples.
    owners = torch.arange(64).clamp(max=40) // 40
    x, y = torch.randn(64, 64), torch.arange(64) % 10
    words = {"scenario": ClassIncremental(1), "split": Split(test=0.0), "batch_size": 8, "seed": 0}
    stream, task, sent = FederatedStream.from_arrays(x, y, owners, **words), Net(), Uploads()
    limit = {"limit_train_batches": 1}
    fit(task, stream, [sent], client_weights=weights, max_vectorized_clients=1, trainer_args=limit)
    assert sorted(sent.samples) == [24, 40]
    by_samples, alike = sent.mean(sent.samples), sent.mean([1, 1])
    near, far = (alike, by_samples) if weights == "uniform" else (by_samples, alike)
    torch.testing.assert_close(task.model[1].weight.double(), near, rtol=0, atol=1e-7)
    assert float((near - far).abs().max()) > 1e-4


def test_resume_with_other_limit_train_batches_raises(fit, stream, tmp_path):
    fit(Net(), stream, [ModelCheckpoint(tmp_path)], max_epochs=1, trainer_args={"enable_checkpointing": True})
    path = next(tmp_path.glob("*.ckpt"))
    with raises(InvalidValueError, "limit_train_batches", code="other-recipe"):
        fit(Net(), stream, ckpt_path=path, trainer_args={"limit_train_batches": 1})


def test_fast_dev_run_writes_no_files(fit, stream, task, tmp_path):
    callbacks = [ModelCheckpoint(tmp_path / "kept"), ContinualMetrics()]
    arguments = {"enable_checkpointing": True, "logger": CSVLogger(tmp_path, "", ""), "fast_dev_run": True}
    trainer = fit(task, stream, callbacks, trainer_args=arguments)
    assert trainer.current_epoch == 1 and not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.seconds
def test_compiled_network_equals_plain_network(fit, stream, assert_same):
    def task(compiled):
        torch.manual_seed(0)
        network = MLP([64, 16, 10])
        if compiled:
            network.compile(backend="eager")
        return Classifier(network, 10, torch.optim.SGD)

    for max_vectorized_clients in (1, "auto"):
        plain, compiled = task(False), task(True)
        fit(plain, stream, max_vectorized_clients=max_vectorized_clients, max_epochs=1)
        fit(compiled, stream, max_vectorized_clients=max_vectorized_clients, max_epochs=1)
        assert_same(plain, compiled)


@pytest.mark.argument("enable_progress_bar", "Supported. One bar per round counts the batches of all clients.")
@pytest.mark.callback("RichProgressBar", "Supported. One bar per round counts the batches of all clients.")
def test_rich_progress_bar_shows_rounds(fit, stream, task, capsys):
    fit(task, stream, [RichProgressBar()], trainer_args={"enable_progress_bar": True})
    assert "Epoch 3/3" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_logger_offline_has_config_and_metrics(fit, stream, task, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")

    class Histograms(L.Callback):
        def on_client_end(self, trainer, pl_module, client_round):
            weight = wandb.Histogram(pl_module.model[1].weight.detach().numpy())
            trainer.logger.experiment.log({f"{client_round.client_id}/weight": weight})

    logger = WandbLogger("digits", save_dir=tmp_path, offline=True)
    trainer = fit(task, stream, [ContinualMetrics(), Histograms()], trainer_args={"logger": logger})
    summary, config = dict(logger.experiment.summary), dict(logger.experiment.config)
    wandb.finish()
    assert summary["server/accuracy"] == pytest.approx(float(trainer.callback_metrics["server/accuracy"]))
    assert {"0/weight", "1/weight", "2/weight", "clients", "clients/accuracy_std"} <= {*summary}
    assert config["num_classes"] == 10


def test_tensorboard_logger_has_hparams_and_metrics(fit, stream, task, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, None, "")
    fit(task, stream, [ContinualMetrics(), LearningRateMonitor()], trainer_args={"logger": logger})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("server/accuracy")) == len(events.Scalars("clients/accuracy_min")) == 4
    assert "lr-SGD" in events.Tags()["scalars"]
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text())["num_classes"] == 10


# Tests of operating systems that spawn processes, and of notebooks.

DATA = """
import lightning as L, torch
from sklearn.datasets import load_digits
from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.partition import IID
from lightning_fcl.models import MLP

class Items(torch.utils.data.Dataset):
    def __init__(self):
        digits = load_digits()
        self.x, self.targets = torch.tensor(digits.data, dtype=torch.float32) / 16, digits.target
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], int(self.targets[i])
"""
FIT = """
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
torch.manual_seed(0)
task = Classifier(MLP([64, 16, 10]), 10)
stream = FederatedStream.from_arrays(Items(), partition=IID(2), num_workers=WORKERS, seed=0)
trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=1, accelerator="cpu", **quiet)
trainer.fit(task, datamodule=stream)
print("weights", float(task.model[1].weight.double().abs().sum()))
"""
SPAWN = 'torch.multiprocessing.set_start_method("spawn", force=True)'


@pytest.mark.slow
@pytest.mark.long
def test_script_without_main_guard_trains_without_workers(tmp_path):
    """A script without a main guard trains without data loader workers. With spawned workers, the error has a hint."""
    fits = [FIT.replace("WORKERS", workers) for workers in "02"]
    (tmp_path / "script.py").write_text("\n".join([DATA, SPAWN, *fits]))
    env = {**os.environ, "PYTHONPATH": str(Path(lightning_fcl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert "weights" in done.stdout, done.stderr
    assert done.returncode == 1
    # A second worker may still write to the same stderr after the error of the main process. Which of two messages the
    # error has depends on the time at which the first worker ends. Both have the hint.
    (line,) = [line for line in done.stderr.splitlines() if "InvalidStateError: Expected" in line]
    assert 'Put the training code below `if __name__ == "__main__":`, or set `num_workers=0`' in line


@pytest.mark.slow
@pytest.mark.long
def test_notebook_trains_and_tests(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    bar = "trainer = L.Trainer(strategy='federated', max_epochs=1, logger=False, enable_checkpointing=False)\n"
    cells = [
        DATA,
        FIT.replace("WORKERS", "0"),
        f"{bar}trainer.fit(task, datamodule=stream)\ntrainer.test(task, stream)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    done = client.NotebookClient(book, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "weights" in str(done.cells[1].outputs) and "test/accuracy" in str(done.cells[2].outputs)
