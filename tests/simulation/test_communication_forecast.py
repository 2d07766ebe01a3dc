"""Tests of the forecast of the communication: it equals the record of a fit, or is a lower bound that says so."""

from functools import partial

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl import Classifier, ClientSpeeds, FedBuff, FederatedStrategy, FederatedStream, RidgeClassifier
from lightning_fcl.callbacks import ContinualMetrics
from lightning_fcl.cli.main import main
from lightning_fcl.conformance.fixtures import make_stream, make_task, train
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental, FedViTScenario
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.summary import format_value
from lightning_fcl.federation.compression import Quantize, TopK
from lightning_fcl.federation.synchronization import Deadline
from lightning_fcl.methods import (
    EWC,
    FOT,
    GLFC,
    SCAFFOLD,
    SI,
    FedDyn,
    FedNova,
    FedProto,
    FedRep,
    FedWEIT,
    ICaRL,
    LwF,
    Replay,
)
from lightning_fcl.models import MLP, FedWEITNet
from lightning_fcl.simulation.communication import forecast_communication


class StopFitError(Exception):
    """Ends a fit before its first round."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Forecast(Callback):
    # Callbacks of other packages can change the parameters.
    __module__ = "lightning_fcl.tests"

    def on_train_epoch_start(self, trainer, pl_module):
        self.result = forecast_communication(trainer.strategy.federation, trainer.max_epochs)
        raise StopFitError


def forecast_and_record(methods=(), make_data=make_stream, **settings):
    """Return the forecast of a fit, and the bytes that the same fit recorded for uploads and downloads."""
    forecast, metrics = Forecast(), ContinualMetrics(clients="none")
    with pytest.raises(StopFitError):
        train([method() for method in methods], make_data(), callbacks=[forecast], **settings)
    train([method() for method in methods], make_data(), callbacks=[metrics], **settings)
    sums = [
        sum(sum(entry[way].values()) for entry in metrics.record["rounds"])
        for way in ("upload_bytes", "download_bytes")
    ]
    return forecast.result, sums


def uneven_stream():
    """Return a stream of clients of which some have no samples of an experience."""
    return make_stream(tasks=3, rounds=2, partition=Dirichlet(6, alpha=0.1), clients=6)


@pytest.mark.parametrize(
    "methods", [(), (Replay,), (EWC,), (SI, Replay), (SCAFFOLD,), (FedRep,), (FedNova,), (FedDyn,)]
)
@pytest.mark.parametrize("settings", [{}, {"participation": 2}], ids=str)
def test_forecast_of_methods_with_constant_sizes_equals_record(methods, settings):
    forecast, sums = forecast_and_record(methods, lambda: make_stream(tasks=3), **settings)
    assert forecast.uncounted == () and [forecast.total_upload, forecast.total_download] == sums


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"participation": 0.5},
        {"compression": TopK(0.1)},
        {"compression": Quantize(8), "participation": 3},
        {"max_epochs": 3},
        {"reductions": {"model.head.*": "local"}},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_forecast_of_clients_without_samples_equals_record(settings):
    forecast, sums = forecast_and_record((), uneven_stream, **settings)
    assert forecast.fixed and [forecast.total_upload, forecast.total_download] == sums
    assert forecast.trainings < 6 * 6


@pytest.mark.parametrize("method", [FedProto, ICaRL, FOT, GLFC, LwF])
@pytest.mark.parametrize("settings", [{}, {"participation": 2}], ids=str)
def test_forecast_of_methods_with_variable_sizes_is_lower_bound(method, settings):
    forecast, sums = forecast_and_record([method], lambda: make_stream(tasks=3), **settings)
    assert method.__name__ in forecast.uncounted
    assert 0 < forecast.total_upload <= sums[0] and 0 < forecast.total_download <= sums[1]


def test_forecast_of_fedweit_is_lower_bound():
    def fit(callback):
        rules = {"model.tasks.*": "local", "model.net.3.*": "local", "model.net.1.weight": "sparse_mean"}
        task = Classifier(FedWEITNet(MLP([64, 8, 10]), 2, layers="1.weight"), 10, sgd, task_incremental=True)
        scenario = FedViTScenario(num_clients=3, num_tasks=2, rounds_per_task=2, classes_per_client=[2, 2])
        stream = FederatedStream("digits", scenario, seed=0)
        train([FedWEIT()], stream, task, callbacks=[callback], precision="32-true", reductions=rules)

    forecast, metrics = Forecast(), ContinualMetrics(clients="none")
    with pytest.raises(StopFitError):
        fit(forecast)
    fit(metrics)
    sums = [sum(sum(e[way].values()) for e in metrics.record["rounds"]) for way in ("upload_bytes", "download_bytes")]
    assert "FedWEIT" in forecast.result.uncounted
    assert forecast.result.total_upload <= sums[0] and forecast.result.total_download <= sums[1]


def test_forecast_of_sparse_uploads_names_the_reduction():
    forecast, sums = forecast_and_record(reductions={"*": "sparse_mean"})
    # The size of each tensor depends on its values.
    assert forecast.uncounted == ("sparse_mean",) and forecast.upload == forecast.download == 0
    assert forecast.total_upload <= sums[0] and forecast.total_download <= sums[1]


@pytest.mark.parametrize("kind", [partial(Deadline, timeout=1000.0), partial(FedBuff, buffer_size=2)])
def test_forecast_on_a_simulated_clock_is_not_fixed(kind):
    forecast, _ = forecast_and_record(synchronization=kind(ClientSpeeds(0.01)))
    assert not forecast.fixed and forecast.upload == forecast.download == 1488


def test_forecast_names_parts_that_can_freeze_parameters(quiet):
    class FreezeBias(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.model[1].bias.requires_grad_(False)

    class OwnClassifier(Classifier):
        pass

    def fit(callback):
        stream = FederatedStream("digits", ClassIncremental(2, 1), Dirichlet(4, alpha=0.5), seed=0)
        trainer = L.Trainer(strategy="federated", callbacks=[FreezeBias(), callback], max_epochs=2, **quiet)
        trainer.fit(OwnClassifier(MLP([64, 10]), 10, sgd), datamodule=stream)

    forecast, metrics = Forecast(), ContinualMetrics(clients="none")
    with pytest.raises(StopFitError):
        fit(forecast)
    fit(metrics)
    assert forecast.result.changing == ("OwnClassifier", "FreezeBias")
    first, second = ({*entry["upload_bytes"].values()} for entry in metrics.record["rounds"])
    # The bias of 10 float32 values is frozen after the first round.
    assert first == {forecast.result.upload} and second == {forecast.result.upload - 40}


def test_validate_prints_condition_for_callback_of_other_package(capsys):
    main(["validate", "quickstart", "--trainer.callbacks+=lightning.pytorch.callbacks.LambdaCallback"])
    said = capsys.readouterr().out
    assert "condition  LambdaCallback must not freeze or add parameters after the first round" in said


def test_forecast_does_not_change_a_later_fit_of_the_same_objects():
    task, stream = make_task(), make_stream()
    with pytest.raises(StopFitError):
        train([], stream, task, callbacks=[Forecast()])
    expected = make_task().state_dict()
    assert all(bool((value == expected[name]).all()) for name, value in task.state_dict().items())


def test_forecast_of_ridge_classifier_equals_record(quiet):
    def fit(callback):
        stream = FederatedStream("digits", ClassIncremental(2, 1), Dirichlet(4, alpha=0.5), seed=0)
        trainer = L.Trainer(strategy=FederatedStrategy(participation=3), callbacks=[callback], max_epochs=2, **quiet)
        trainer.fit(RidgeClassifier(MLP([64, 16]), 16, 10), datamodule=stream)

    forecast, metrics = Forecast(), ContinualMetrics(clients="none")
    with pytest.raises(StopFitError):
        fit(forecast)
    fit(metrics)
    uploads = sum(sum(entry["upload_bytes"].values()) for entry in metrics.record["rounds"])
    downloads = sum(sum(entry["download_bytes"].values()) for entry in metrics.record["rounds"])
    assert (forecast.result.total_upload, forecast.result.total_download) == (uploads, downloads)


@pytest.mark.parametrize("seed", [0, 7])
def test_validate_prints_the_bytes_that_a_fit_records(tmp_path, capsys, seed):
    settings = ["--data.partition", "Dirichlet", "--data.partition.num_clients", "8", "--data.partition.alpha", "0.1"]
    settings += ["--trainer.max_epochs", "4", "--trainer.strategy.participation", "3", "--seed_everything", str(seed)]
    settings += ["--trainer.strategy.local_epochs", "1"]
    main(["validate", "quickstart", *settings])
    said = capsys.readouterr().out
    main(["fit", "quickstart", *settings, "--trainer.enable_progress_bar", "false", "--out", str(tmp_path / "run")])
    metrics = read_results(tmp_path / "run")["metrics"]
    for way in ("upload", "download"):
        total = format_value(metrics[f"{way}_bytes/total"], "B")
        assert f"{way:11}19.2 kB per client and round, {total} in 4 rounds" in said


def test_validate_of_method_with_messages_prints_lower_bound(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: lightning_fcl.callbacks.FOT\n"
        "  strategy: {class_path: lightning_fcl.FederatedStrategy}\n"
        "model:\n  class_path: lightning_fcl.Classifier\n  init_args:\n    num_classes: 10\n"
        "    model: {class_path: lightning_fcl.models.MLP, init_args: {sizes: [64, 8, 10]}}\n"
        "    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
        "data: {data: digits, scenario: ClassIncremental, partition: IID}\n"
    )
    main(["validate", str(tmp_path / "own.yaml")])
    said = capsys.readouterr().out
    assert "upload     at least 2.44 kB per client and round, at least " in said
    assert "uncounted  tensors of FOT, because their size is known only during training" in said
