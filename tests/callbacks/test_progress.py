"""Tests of the lines that `FederatedProgressBar` writes if the standard error stream is not a terminal."""

import re

import lightning.pytorch as L
import pytest
import torch

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import ContinualMetrics, FederatedProgressBar
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.models import MLP

LINE = r"experience (\d)/2, round (\d)/4(?:, accuracy (0\.\d{3}))?, [\d.]+ s, ([\d.]+) s remaining"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def fit(quiet):
    def run(callbacks, **arguments):
        stream = FederatedStream("digits", ClassIncremental(2, 2), IID(2))
        settings = {**quiet, "enable_progress_bar": True, **arguments}
        trainer = L.Trainer(strategy="federated", callbacks=callbacks, **settings)
        trainer.fit(Classifier(MLP([64, 10]), 10, sgd), datamodule=stream)

    return run


def test_progress_without_terminal_is_one_line_per_round(fit, capfd):
    metrics = ContinualMetrics(clients="none")
    fit([FederatedProgressBar(), metrics], max_epochs=4)
    lines = [re.fullmatch(LINE, line) for line in capfd.readouterr().err.splitlines() if "round" in line]
    assert [(line[1], line[2]) for line in lines] == [("1", "1"), ("1", "2"), ("2", "3"), ("2", "4")]
    totals = sum(metrics.record["totals"])
    tested = {
        entry["round"]: sum(entry["correct"]["server"]) / totals
        for entry in metrics.record["rounds"]
        if "server" in entry["correct"]
    }
    assert {int(line[2]) - 1: line[3] for line in lines if line[3]} == {
        round_idx: f"{value:.3f}" for round_idx, value in tested.items()
    }
    assert float(lines[-1][4]) == 0


def test_progress_disabled_writes_nothing(fit, capfd):
    fit([], max_epochs=1, enable_progress_bar=False)
    bar = FederatedProgressBar()
    bar.disable()
    fit([bar], max_epochs=1)
    assert "round" not in capfd.readouterr().err
