"""Tests of `PredictionWriter`: its lines agree with independent predictions, and with the record of the run."""

import copy

import lightning.pytorch as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises

from lightning_fcl import FederatedStrategy, FederatedStream, Regressor
from lightning_fcl.callbacks import APFL, ContinualMetrics, PredictionWriter, Replay, ServerWeightAveraging
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.errors import InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.evaluation.confusion import confusions
from lightning_fcl.models import MLP


@pytest.fixture
def predictions(fit, tmp_path):
    """Return a function that fits with a `PredictionWriter`, and returns the table of predictions by model."""

    def run(task, stream, callbacks=(), trainer_args=None, writer_args=None, **kwargs):
        writer = PredictionWriter(**(writer_args or {}))
        fit(
            task,
            stream,
            [writer, *callbacks],
            trainer_args={"default_root_dir": tmp_path, **(trainer_args or {})},
            **kwargs,
        )
        table = pd.read_csv(tmp_path / writer.file, dtype={"model": str})
        return dict(iter(table.groupby("model", sort=False)))

    return run


DOMAINS = {"scenario": "domain-incremental", "group": np.arange(240) // 80}


@pytest.mark.parametrize("stream_args", [{}, DOMAINS])
@pytest.mark.parametrize("make_methods", [list, lambda: [APFL()], lambda: [Replay(10), ServerWeightAveraging(0.5)]])
def test_predictions_equal_recorded_counts_and_confusion(
    predictions, make_stream, make_task, make_methods, stream_args
):
    stream, metrics = make_stream(rounds_per_experience=2, **stream_args), ContinualMetrics(when="aggregated")
    tables = predictions(make_task(), stream, [*make_methods(), metrics])
    has_personal_models = any(isinstance(method, APFL) for method in make_methods())
    assert [*tables] == ["server", *("012" if has_personal_models else "")]
    last, matrices = metrics.record["rounds"][-1], confusions(metrics.record)
    for model, table in tables.items():
        groups = stream.plan.groups[stream.plan.test][table["sample"]]
        right = (table["target"] == table["prediction"]).to_numpy()
        for group, count in enumerate(last["correct"][model]):
            assert right[groups == group].sum() == (count or 0)
        pairs = table.groupby(["target", "prediction"]).size()
        assert [[*pair, count] for pair, count in pairs.items()] == matrices[model, last["experience"][model]]
        assert table["target"].tolist() == stream.y[stream.plan.test][table["sample"]].tolist()
        tasks = metrics.record["tasks"][model]
        assert all(group in tasks[task] for group, task in zip(groups, table["test_task"], strict=True))
    assert tables["server"]["sample"].tolist() == [*range(len(stream.plan.test))]


def test_predictions_probabilities_equal_softmax_of_logits(predictions, make_stream, make_task):
    stream, task = make_stream(), make_task()
    table = predictions(task, stream, writer_args={"probabilities": True})["server"]
    x, _ = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        logits = copy.deepcopy(task).eval()(x)
    shares = table[[f"probability {name}" for name in stream.classes]].to_numpy()
    np.testing.assert_allclose(shares, logits.softmax(1).numpy(), rtol=1e-4)
    assert table["prediction"].tolist() == logits.argmax(1).tolist()


def test_predictions_outputs_per_step_have_line_for_each_step(
    predictions, make_series_stream, make_reservoir, make_reservoir_task
):
    stream, task = make_series_stream(3, 2), make_reservoir_task(make_reservoir(washout=4), readout="steps")
    table = predictions(task, stream)["server"]
    x, _ = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        expected = task(x).argmax(-1)
    names = {name: number for number, name in enumerate(map(str, stream.classes))}
    for (sample, step), prediction in table.set_index(["sample", "step"])["prediction"].items():
        assert names[str(prediction)] == expected[sample, step]
    assert len(table) == expected.numel()


def test_predictions_split_validation_has_validation_samples(predictions, make_stream, make_task):
    stream = make_stream(validation=0.3)
    table = predictions(make_task(), stream, writer_args={"split": "validation", "file": "more/validation.csv"})[
        "server"
    ]
    assert table["target"].tolist() == stream.y[stream.plan.validation].tolist()


@pytest.mark.parametrize(("clients", "models"), [("none", ["server"]), (["2"], ["server", "2"])])
def test_predictions_clients_argument_selects_models(predictions, make_stream, make_task, clients, models):
    assert [*predictions(make_task(), make_stream(), [APFL()], writer_args={"clients": clients})] == models


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_predictions_resumed_fit_writes_same_file(predictions, make_stream, make_task, tmp_path, epoch):
    words, saver = {"rounds_per_experience": 2}, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    predictions(make_task(), make_stream(**words), [APFL(), saver], {"enable_checkpointing": True})
    whole = (tmp_path / "predictions.csv").read_bytes()
    (tmp_path / "predictions.csv").unlink()
    path = tmp_path / f"epoch={epoch}.ckpt"
    predictions(make_task(seed=3), make_stream(**words), [APFL()], ckpt_path=path)
    assert (tmp_path / "predictions.csv").read_bytes() == whole


def test_predictions_plain_trainer_equal_final_model(predictions, make_stream, make_task):
    stream, task = make_stream(num_clients=1), make_task()
    tables = predictions(task, stream, strategy="auto", max_epochs=2)
    x, _ = stream.get_samples(stream.plan.test)
    with torch.no_grad():
        assert tables["server"]["prediction"].tolist() == task.eval()(x).argmax(1).tolist()


@pytest.mark.parametrize("epoch", [0, 1])
def test_predictions_plain_trainer_resumed_fit_writes_same_file(predictions, make_stream, make_task, tmp_path, epoch):
    saver, options = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), {"strategy": "auto", "max_epochs": 2}
    predictions(make_task(), make_stream(num_clients=1), [saver], {"enable_checkpointing": True}, **options)
    whole = (tmp_path / "predictions.csv").read_bytes()
    (tmp_path / "predictions.csv").unlink()
    path = tmp_path / f"epoch={epoch}.ckpt"
    predictions(make_task(seed=3), make_stream(num_clients=1), ckpt_path=path, **options)
    assert (tmp_path / "predictions.csv").read_bytes() == whole


def test_predictions_do_not_change_model_or_record(fit, make_stream, make_task, tmp_path):
    records, states = [], []
    for writers in ([], [PredictionWriter()]):
        task, metrics = make_task(), ContinualMetrics(when="aggregated")
        fit(task, make_stream(), [APFL(), metrics, *writers], trainer_args={"default_root_dir": tmp_path})
        for entry in metrics.record["rounds"]:
            entry |= {"seconds": 0, "processor_seconds": 0}
        records.append(metrics.record)
        states.append(task.state_dict())
    assert records[0] == records[1]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.seconds
def test_predictions_two_processes_equal_one_process(make_stream, make_task, fit, tmp_path):
    files = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        strategy = FederatedStrategy(start_method="fork", max_vectorized_clients=1)
        metrics = ContinualMetrics()
        options = {"devices": number, "default_root_dir": folder}
        fit(make_task(), make_stream(), [APFL(), metrics, PredictionWriter()], strategy, trainer_args=options)
        files.append(((folder / "predictions.csv").read_bytes(), confusions(metrics.record)))
    assert files[0] == files[1] and len(files[0][1]) == 8


def test_predictions_fast_dev_run_writes_no_file(make_stream, make_task, quiet, tmp_path):
    trainer = L.Trainer(
        **quiet,
        strategy=FederatedStrategy(),
        default_root_dir=tmp_path,
        fast_dev_run=True,
        callbacks=[PredictionWriter()],
    )
    trainer.fit(make_task(), datamodule=make_stream())
    assert not [*tmp_path.iterdir()]


class Raises(Callback):
    """Fails the test if a round starts."""

    def on_train_epoch_start(self, trainer, pl_module):
        raise AssertionError("a round started")


def test_predictions_regressor_raises_before_first_round(fit):
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    stream = FederatedStream.from_arrays(x, x[:, :2], np.arange(60) % 3, scenario=Stationary(), batch_size=8, seed=0)
    task = Regressor(MLP([6, 5, 2]), 2, lambda params: torch.optim.SGD(params, lr=0.01))
    with raises(InvalidValueError, "module", value="Regressor"):
        fit(task, stream, [PredictionWriter(), Raises()])


def test_predictions_invalid_arguments_raise(fit, make_stream, make_task):
    with raises(UnknownNameError, "split", value="train"):
        PredictionWriter(split="train")
    with raises(InvalidValueError, "clients", value="some"):
        PredictionWriter(clients="some")
    with raises(UnknownNameError, "clients", value=["7"]):
        fit(make_task(), make_stream(), [PredictionWriter(clients=["7"]), Raises()])
    with raises(MissingValueError, "split", value="validation"):
        fit(make_task(), make_stream(), [PredictionWriter(split="validation"), Raises()])
