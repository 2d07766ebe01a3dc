"""Tests of `fit --predictions`: predictions of the final model in `predictions.csv` of the run folder."""

import json

import pandas as pd
import pytest
import torch
import yaml

import lightning_fcl
from lightning_fcl.cli.main import main
from lightning_fcl.evaluation import read_run
from lightning_fcl.evaluation.results import is_complete
from lightning_fcl.io.safe_yaml import read_yaml

MODULE = """
import lightning_fcl
from lightning_fcl.models import MLP


class Bins(lightning_fcl.Regressor):
    def __init__(self):
        super().__init__(MLP([64, 8, 1]), 1, lambda params: __import__("torch").optim.SGD(params, lr=0.01))
"""


def check_predictions(folder):
    """Check that the accuracy of the lines equals the final accuracy of the run."""
    table = pd.read_csv(folder / "predictions.csv", dtype={"model": str})
    server = table[table["model"] == "server"]
    accuracy = (server["target"] == server["prediction"]).mean()
    assert accuracy == pytest.approx(read_run(folder).metrics["final_accuracy/server"])
    return server["prediction"].tolist()


def count_writers(folder):
    callbacks = read_yaml(folder / "config.yaml")["trainer"]["callbacks"]
    return sum(entry["class_path"].endswith("PredictionWriter") for entry in callbacks)


@pytest.mark.seconds
def test_fit_predictions_writes_file_and_prints_path(tiny, tmp_path, capsys):
    main(["fit", *tiny, "--out", str(tmp_path / "with"), "--predictions"])
    assert f"predictions: {tmp_path / 'with' / 'predictions.csv'}" in capsys.readouterr().out
    check_predictions(tmp_path / "with")
    main(["fit", *tiny, "--out", str(tmp_path / "without")])
    assert "predictions:" not in capsys.readouterr().out and not (tmp_path / "without" / "predictions.csv").exists()
    # The predictions change neither the results nor the model.
    left, right = (read_run(tmp_path / name) for name in ("with", "without"))
    pd.testing.assert_frame_equal(left.rounds, right.rounds)
    pd.testing.assert_frame_equal(left.confusion, right.confusion)


@pytest.mark.seconds
def test_fit_predictions_keeps_writer_of_recipe(tiny, tmp_path):
    writer = {"class_path": "PredictionWriter", "init_args": {"probabilities": True, "clients": "none"}}
    more = ["--trainer.callbacks", json.dumps([writer])]
    main(["fit", *tiny, *more, "--out", str(tmp_path / "run"), "--predictions"])
    assert count_writers(tmp_path / "run") == 1
    shares = pd.read_csv(tmp_path / "run" / "predictions.csv").filter(like="probability ")
    assert shares.shape[1] == 10 and shares.sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize("callbacks", ["null", "[]", "Replay"])
def test_fit_predictions_is_added_to_any_callbacks(tiny, tmp_path, callbacks):
    main(["fit", *tiny, "--trainer.callbacks", callbacks, "--out", str(tmp_path / "run"), "--predictions"])
    check_predictions(tmp_path / "run")
    entries = read_yaml(tmp_path / "run" / "config.yaml")["trainer"]["callbacks"]
    assert len(entries) == 1 + (callbacks == "Replay")


@pytest.mark.seconds
def test_fit_predictions_resumed_run_equals_whole_run(tiny, tmp_path):
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    main(["fit", *tiny, "--out", str(whole), "--predictions"])
    main(["fit", *tiny, "--out", str(begun), "--trainer.max_epochs", "1", "--predictions"])
    first = check_predictions(begun)
    main(["fit", str(begun), "--trainer.max_epochs", "2"])
    assert (begun / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    assert check_predictions(begun) != first and count_writers(begun) == 1


@pytest.mark.seconds
def test_fit_predictions_of_finished_run_trains_no_round(tiny, tmp_path):
    main(["fit", *tiny, "--out", str(tmp_path / "run")])
    before = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    main(["fit", str(tmp_path / "run"), "--predictions"])
    check_predictions(tmp_path / "run")
    assert is_complete(tmp_path / "run")
    after = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.seconds
def test_fit_predictions_with_seeds_writes_file_of_each_seed(tiny, tmp_path):
    main(["fit", *tiny, "--out", str(tmp_path), "--seeds", "2", "--workers", "1", "--predictions"])
    assert check_predictions(tmp_path / "seed-0") != check_predictions(tmp_path / "seed-1")


@pytest.mark.seconds
def test_fit_predictions_first_tasks_writes_predictions_of_these_tasks(tiny, tmp_path):
    main(["fit", *tiny, "--out", str(tmp_path / "run"), "--recipe.first_tasks", "1", "--predictions"])
    check_predictions(tmp_path / "run")


@pytest.mark.seconds
def test_fit_predictions_eval_split_validation_predicts_validation_samples(tiny, tmp_path):
    split = ["--data.split", json.dumps({"validation": 0.3})]
    main(["fit", *tiny, *split, "--recipe.eval_split", "validation", "--out", str(tmp_path / "run"), "--predictions"])
    check_predictions(tmp_path / "run")


def test_fit_predictions_without_classes_raises_before_training(tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bins.py").write_text(MODULE)
    recipe = {
        "model": {"class_path": "bins.Bins"},
        "data": {"data": "digits", "scenario": {"class_path": "Stationary"}, "partition": {"class_path": "IID"}},
        "trainer": {"strategy": {"class_path": "FederatedStrategy"}, "enable_progress_bar": False},
    }
    (tmp_path / "bins.yaml").write_text(yaml.safe_dump(recipe))
    message = error_of(["fit", "bins.yaml", "--out", "run", "--predictions"])
    assert "Expected a module that predicts classes for `PredictionWriter`, but `Bins`" in message
    assert not (tmp_path / "run" / "predictions.csv").exists()
    assert lightning_fcl.Regressor.__name__ not in message
