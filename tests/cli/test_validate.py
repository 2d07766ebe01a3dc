"""Tests that `lightning-fcl validate` reports the same error messages as `fit`, without training.

Each error has its own test elsewhere. These tests cover one example of each place that raises an error.
"""

import textwrap

import pytest

from lightning_fcl.cli.main import main
from lightning_fcl.runs.loaded_recipe import load_recipe
from lightning_fcl.runs.paper_rows import find_recipes

OWN = """
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from lightning_fcl import Classifier
from lightning_fcl.models import MLP


class Own(Classifier):
    def __init__(self):
        super().__init__(MLP([64, 8, 10]), 10)


class Plateau(Own):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Infinite(Own):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.model[1].weight, float("inf"))


class ByHand(Own):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        pass


class Outputs(L.LightningModule):
    # Returns outputs in different structures.

    def __init__(self, kind: str = "tuple"):
        super().__init__()
        self.net, self.kind = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), kind

    def forward(self, x):
        logits = self.net(x)
        if self.kind == "dict":
            return {"logits": logits, "pixels": [x]}
        return Named(logits) if self.kind == "dataclass" else (logits, logits.argmax(-1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Several(Outputs):
    # `forward` takes a second argument beside the sample.

    def forward(self, x, mask):
        return self.net(x * mask)


class Prepared(Several):
    # The steps prepare the input of `forward`.

    def forward(self, x):
        return self.net[1](x)


class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@dataclass
class Named:
    logits: torch.Tensor


class Items(Dataset):
    def __init__(self):
        self.y = torch.arange(60) % 10

    def __len__(self):
        return 60

    def __getitem__(self, number):
        return torch.zeros(1, 8, 8), int(self.y[number])


class Texts(Items):
    def __getitem__(self, number):
        return "a scan", int(self.y[number])


class Keeps(L.Callback):
    def state_dict(self):
        return {"folders": [Path("scans")]}


class Floats(Items):
    def __getitem__(self, number):
        return torch.zeros(1, 8, 8), float(self.y[number])


class Starts(L.Callback):
    def on_train_start(self, trainer, pl_module):
        raise ValueError("Expected a callback's own refusal when training starts")


class Notes(L.Callback):
    def __getattribute__(self, name):
        if name.startswith("on_train_"):
            print("noted", name)
        return super().__getattribute__(name)
"""
SMALL = """
data:
  scenario: {init_args: {num_experiences: 2, rounds_per_experience: 1}}
  partition: {init_args: {num_clients: 3}}
  batch_size: 128
trainer: {max_epochs: 2, enable_progress_bar: false, strategy: {init_args: {local_epochs: 1}}}
"""
DEADLINE = (
    "{class_path: lightning_fcl.federation.synchronization.Deadline, init_args: {timeout: 30, "
    "speeds: {class_path: lightning_fcl.federation.client_speeds.ClientSpeeds, init_args: {seconds_per_sample: 0.01}}}}"
)


def trainer(settings):
    return f"trainer: {{{settings}}}"


def callback(path, arguments=""):
    return f"trainer: {{callbacks: [{{class_path: {path}, init_args: {{{arguments}}}}}]}}"


def model(path, settings=""):
    return f"trainer: {{callbacks: [], {settings}}}\nmodel: {{class_path: {path}}}"


REFUSED = [
    (
        "data: {data: {class_path: own_parts.Floats}, scenario: Stationary, partition: Shards}",
        "Expected targets that are classes for `Shards`, but got targets of type float64. Use another `partition`",
    ),
    (trainer("max_steps: 5"), "Expected `max_steps=-1` and `min_steps=None`, but got 5 and None"),
    (trainer("val_check_interval: '00:00:00:01'"), "but got a time and 1. Within a round"),
    (trainer("check_val_every_n_epoch: null"), "but got 1.0 and None. Within a round"),
    (trainer("accumulate_grad_batches: 0"), "Expected `accumulate_grad_batches` to be at least 1 but got 0"),
    (trainer("max_epochs: 0"), "Expected the fit to train for at least one round, but `max_epochs=0`"),
    (trainer("max_time: '00:00:00:00'"), "Expected the fit to train for at least one round"),
    (trainer("limit_train_batches: 0"), "Expected the fit to train for at least one round"),
    (trainer("devices: -3"), "Expected `trainer.devices` to be a positive number of devices, but got another value"),
    (trainer("strategy: auto"), 'Expected a Trainer with `strategy="federated"` for a stream of 3 clients'),
    (
        trainer(f"callbacks: [], limit_train_batches: 1, strategy: {{init_args: {{synchronization: {DEADLINE}}}}}"),
        "Expected `limit_train_batches=1.0` and no `overfit_batches` together with `synchronization`, but got 1",
    ),
    (callback("BatchSizeFinder"), "Expected no `BatchSizeFinder` among"),
    (callback("LearningRateFinder"), "Expected no `LearningRateFinder` among"),
    (callback("StochasticWeightAveraging", "swa_lrs: 0.1"), "Expected no `StochasticWeightAveraging` among"),
    (callback("ModelCheckpoint", "every_n_train_steps: 5"), "but got `every_n_train_steps=5`, which would save"),
    (
        callback("ModelCheckpoint", "train_time_interval: '0:00:05'"),
        "but got `train_time_interval=0:00:05`, which would save",
    ),
    (
        trainer("enable_checkpointing: false, callbacks: [{class_path: ModelCheckpoint}]"),
        "that Lightning accepts, but got: Trainer was configured with `enable_checkpointing=False`",
    ),
    (
        trainer("logger: false, callbacks: [{class_path: LearningRateMonitor}]"),
        "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger",
    ),
    (callback("lightning_fcl.callbacks.ActivationDensity"), "Expected a `ReservoirTask` for `ActivationDensity`"),
    (callback("lightning_fcl.callbacks.BaseSession"), "Expected a `Classifier` or `RidgeClassifier` whose `model`"),
    (callback("lightning_fcl.callbacks.Pretrain"), "Expected a scenario with samples for pre-training"),
    (callback("lightning_fcl.callbacks.FedWEIT"), "Expected a `Classifier` of a `FedWEITNet` for `FedWEIT`"),
    (
        callback("own_parts.Keeps"),
        "to contain only tensors and plain values, but `checkpoint['callbacks']['Keeps']['folders'][0]",
    ),
    (
        "data: {data: {class_path: own_parts.Texts}, split: {test: 0.5}}\n" + callback("lightning_fcl.callbacks.GEM"),
        "Expected each value of a batch to be a tensor with one row per sample for `GEM`, which works on single",
    ),
    (callback("own_parts.Starts"), "Expected a callback's own refusal when training starts"),
    ("recipe: {eval_split: validation}", "Expected the stream to have validation samples for `ContinualMetrics`"),
    ("ckpt_path: nothing.ckpt", "Expected a checkpoint at nothing.ckpt but there is none"),
    (model("own_parts.Plateau"), "Expected validation samples for `ReduceLROnPlateau`, which monitors `val/loss`"),
    (model("own_parts.Infinite"), "server state, but got non-finite numbers in `model.1.weight`"),
    (
        model("own_parts.ByHand", settings="gradient_clip_val: 2"),
        "that Lightning accepts, but got: Automatic gradient clipping is not supported",
    ),
    (
        trainer("accumulate_grad_batches: 2, callbacks: [{class_path: lightning_fcl.callbacks.APFL}]"),
        "Expected `accumulate_grad_batches=1` for `APFL`",
    ),
]  # fmt: skip
FINE = [
    trainer("barebones: true"),
    trainer("precision: 64"),
    callback("DeviceStatsMonitor"),
    callback("own_parts.Notes"),
    model("own_parts.Own"),
    "data: {data: {class_path: own_parts.Items}, split: {test: 0.5}}",
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_parts.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "small.yaml").write_text(SMALL)


@pytest.mark.seconds
@pytest.mark.parametrize(("recipe", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_validate_prints_same_error_as_fit(recipe, message, error_of, tmp_path):
    (tmp_path / "own.yaml").write_text(recipe)
    told = error_of(["validate", "quickstart", "small.yaml", "own.yaml"])
    assert message in told
    assert told == error_of(["fit", "quickstart", "small.yaml", "own.yaml", "--out", "out"])


@pytest.mark.seconds
@pytest.mark.parametrize("recipe", FINE)
def test_validate_accepts_valid_recipe_without_training(recipe, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(recipe)
    before = sorted(path.name for path in tmp_path.iterdir())
    main(["validate", "quickstart", "small.yaml", "own.yaml"])
    said = capsys.readouterr().out
    assert "The recipe is valid." in said
    assert "noted on_train_batch_start" not in said and "noted on_train_end" not in said
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before
    main(["fit", "quickstart", "small.yaml", "own.yaml", "--out", "out"])
    assert (tmp_path / "out" / "results.json").is_file()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("settings", "described"),
    [
        ("own_parts.Outputs, init_args: {kind: tuple}", "outputs of shape [(10,), ()]"),
        ("own_parts.Outputs, init_args: {kind: dict}", "outputs of shape {logits: (10,), pixels: [(1, 8, 8)]}"),
        ("own_parts.Outputs, init_args: {kind: dataclass}", "outputs of shape {logits: (10,)}"),
        ("own_parts.Several", "Several of 650 parameters\n"),
        ("own_parts.Prepared", "Prepared of 650 parameters\n"),
    ],
)
def test_validate_describes_outputs_of_any_structure(settings, described, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(f"trainer: {{callbacks: []}}\nmodel: {{class_path: {settings}}}")
    main(["validate", "quickstart", "small.yaml", "own.yaml"])
    assert described in capsys.readouterr().out
    main(["fit", "quickstart", "small.yaml", "own.yaml", "--out", "out"])


@pytest.mark.seconds
def test_validate_reports_clients_below_min_partition_size(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(
        "data:\n  batch_size: 7\n"
        "  partition: {class_path: Dirichlet, init_args: {num_clients: 8, alpha: 0.1, min_partition_size: 5}}\n"
        "model: {init_args: {model: {class_path: own_parts.Normalized}}}\ntrainer: {callbacks: []}"
    )
    words = ["quickstart", "small.yaml", "own.yaml"]
    main(["validate", *words])
    said = capsys.readouterr().out
    assert "fewer than 5 samples in an experience: " in said and "of 8 clients, such as client" in said
    main(["fit", *words, "--out", "out"])
    stream = resolve_stream(words)
    sizes = {
        (client, number): len(stream.plan.train[number].get(client, ()))
        for client in stream.plan.clients
        for number in range(stream.plan.num_rounds)
    }
    few = {client for (client, _), size in sizes.items() if size < 5}
    assert f"{len(few)} of 8 clients" in said
    (client, number) = min(sizes, key=sizes.get)
    assert f"client {client} with {sizes[client, number]} in experience {number}" in said


def resolve_stream(words):
    parts = load_recipe(find_recipes(words))
    parts.datamodule.setup("fit")
    return parts.datamodule


@pytest.mark.seconds
def test_validate_starts_no_processes(error_of, monkeypatch, capsys):
    monkeypatch.setattr("subprocess.Popen", None)
    words = ["quickstart", "small.yaml", "--trainer.strategy.max_vectorized_clients", "1", "--trainer.devices"]
    main(["validate", *words, "3"])
    assert capsys.readouterr().out.count("The recipe is valid.") == 1
    told = error_of(["validate", *words, "8"])
    assert (
        "Expected the number of processes (`devices` times `num_nodes`) to be at most 3, the largest number of "
        "client groups in a round, but got 8. Each group has at most 1 client." in told
    )
