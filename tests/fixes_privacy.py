"""Table of hints in the error messages of differential privacy."""

import json
from dataclasses import asdict

import numpy as np
import torch
from fixes import Row, fit_one_round, sgd
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_fcl import (
    AdaptiveClip,
    Classifier,
    ClientSpeeds,
    Deadline,
    DifferentialPrivacy,
    FederatedStrategy,
    FederatedStream,
    Poisson,
    RidgeClassifier,
    Stage,
    Swarm,
    TopK,
    UploadTransform,
)
from lightning_fcl.callbacks import FedCBDR, FedNova, FedProx, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.deployment.deployment_server import check_deployable
from lightning_fcl.errors import DamagedFileError, InvalidStateError, MissingValueError
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.synchronization import Participation
from lightning_fcl.models import MLP
from lightning_fcl.privacy.accounting import compute_epsilon
from lightning_fcl.privacy.differential_privacy import PrivacyAccount
from lightning_fcl.privacy.ledger import Charge, PrivacyLedger
from lightning_fcl.privacy.transforms import ClipUpdates
from lightning_fcl.simulation.private_rounds import count_uses

SECONDS: set[str] = set()


def private(**changes):
    return DifferentialPrivacy(**{"unit": "client", "delta": 1e-2, "clip": 1.0, "noise_multiplier": 1.0, **changes})


def fit_private(lab, task=None, privacy=None, **options):
    return fit_one_round(lab, task=task, privacy=private() if privacy is None else privacy, **options)


def make_strategy(lab, **options):
    return FederatedStrategy(privacy=private(), **options)


class AddsNoise(UploadTransform):
    """A transform of the stage noise."""

    stage = Stage.NOISE


class Scheduled(Classifier):
    """A classifier with a scheduler."""

    def __init__(self, scheduler):
        super().__init__(MLP([6, 5, 4]), 4)
        self.scheduler = scheduler

    def configure_optimizers(self):
        optimizer = sgd(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "monitor": "train/loss"},
        }


class Changing(Classifier):
    """A classifier whose training changes the weight of the first layer by hand."""

    def __init__(self, requires_grad):
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), 4, sgd)
        self.model[0].weight.requires_grad_(requires_grad)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.model[0].weight.add_(0.1)
        return super().training_step(batch, batch_idx)


class HalfIntegers(Classifier):
    """A classifier with an entry of integers that are not a buffer of a layer."""

    def __init__(self):
        super().__init__(MLP([6, 5, 4]), 4, sgd)
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def batch_norm():
    return Classifier(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), 4, sgd)


def group_norm():
    return Classifier(nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4)), 4, sgd)


LOCAL = {"*running*": "local", "*num_batches*": "local"}


def read_ledger(lab, line):
    path = lab.folder / "ledger.jsonl"
    path.write_bytes(line)
    return PrivacyLedger(path)


def ridge():
    return RidgeClassifier(MLP([6, 5, 4]), 4, unit_norm=True)


def fit_with_ledger_of_unit(lab, unit):
    ledger = write_ledger(lab, 1)
    clip = 1.0 if unit == "client" else None
    return fit_private(lab, ridge(), private(unit=unit, clip=clip, delta=1e-3, ledger=str(ledger.path)))


def count_shared(unit):
    """Count the uses of samples of a plan in which two clients have the same sample, at sample level."""
    stream = FederatedStream("digits", scenario=Stationary(1), partition=IID(2))
    stream.setup("fit")
    rows = stream.plan.train[0]
    rows["1"] = np.append(rows["1"], rows["0"][0])
    return count_uses(stream.plan) if unit == "sample" else 1


def write_ledger(lab, number):
    ledger = PrivacyLedger(lab.folder / "ledger.jsonl")
    for round_idx in range(number):
        ledger.charge(Charge(round_idx, "other", 1.0, 1.0, "client", 10))
    return ledger


def fit_with_spent_budget(lab, epsilon=1.0, noise_multiplier=1.0):
    spent = write_ledger(lab, 1)
    epsilon = epsilon * compute_epsilon(spent.counts().elements(), 1e-2)
    settings = private(epsilon=epsilon, noise_multiplier=noise_multiplier, ledger=str(spent.path))
    return fit_private(lab, privacy=settings)


SAMPLE = private(unit="sample", clip=None, delta=1e-3)
CHARGE = json.dumps(asdict(Charge(0, "a", 1.0, 1.0, "client", 10))).encode() + b"\n"

ROWS: dict[str, Row] = {
    "Poisson sampling in a swarm": Row(
        lambda lab, **words: Participation(Poisson(0.3), **words),
        {"swarm": Swarm()},
        {"swarm": None},
        "Remove `swarm`, or use a number as `participation`.",
        argument="swarm",
    ),
    "Poisson sampling with a deadline": Row(
        lambda lab, participation: Participation(participation, synchronization=Deadline(ClientSpeeds(0.01))),
        {"participation": Poisson(0.3)},
        {"participation": 0.3},
        "Remove `synchronization`, or use a number as `participation`.",
        argument="synchronization",
    ),
    "Poisson sampling in a deployment": Row(
        lambda lab, participation: check_deployable(Participation(participation), Pipeline(), []),
        {"participation": Poisson(0.3)},
        {"participation": 0.3},
        "Leave `participation` out.",
    ),
    "privacy in a deployment": Row(
        lambda lab, transforms: check_deployable(Participation(), Pipeline(transforms), []),
        {"transforms": [ClipUpdates(PrivacyAccount(private()))]},
        {"transforms": []},
        "Use `lightning-fcl fit` to simulate the federation.",
        argument="privacy",
    ),
    "delta of many clients": Row(
        lambda lab, delta: PrivacyAccount(private(delta=delta)).start(100, 1.0, 1),
        {"delta": 0.01},
        {"delta": 0.001},
        "Use for example `delta=0.001`.",
        argument="delta",
    ),
    "privacy without a budget": Row(
        lambda lab, **words: private(noise_multiplier=None, **words),
        {"epsilon": None},
        {"epsilon": 4.0},
        "Set a budget, such as `epsilon=4.0`.",
        MissingValueError,
        argument="epsilon",
    ),
    "noise without a maximum norm": Row(
        lambda lab, clip: private(clip=clip),
        {"clip": float("inf")},
        {"clip": 1.0},
        "Use for example `clip=1.0`. Only with `noise_multiplier=0`",
        argument="clip",
    ),
    "no noise and no maximum norm": Row(
        lambda lab, noise_multiplier: private(clip=float("inf"), noise_multiplier=noise_multiplier),
        {"noise_multiplier": 1.0},
        {"noise_multiplier": 0.0},
        "Only with `noise_multiplier=0`, updates need no maximum norm.",
        argument="clip",
    ),
    "client level without a maximum norm": Row(
        lambda lab, clip: private(clip=clip),
        {"clip": None},
        {"clip": 1.0},
        "Set a maximum norm, such as `clip=1.0`.",
        MissingValueError,
        argument="clip",
    ),
    "sample level with a maximum norm": Row(
        lambda lab, **words: private(unit="sample", **words),
        {"clip": 1.0},
        {"clip": None},
        'Remove `clip`, or use `unit="client"`.',
        argument="clip",
    ),
    "client level with a maximum norm": Row(
        lambda lab, unit: private(unit=unit),
        {"unit": "sample"},
        {"unit": "client"},
        'Remove `clip`, or use `unit="client"`.',
        argument="clip",
    ),
    "sample level of a network": Row(
        lambda lab, unit: fit_private(lab, privacy=private(unit=unit, clip=1.0 if unit == "client" else None)),
        {"unit": "sample"},
        {"unit": "client"},
        'Use `unit="client"`, or a `RidgeClassifier` with `unit_norm=True`.',
        argument="unit",
    ),
    "sample level of a ridge regression": Row(
        lambda lab, make: fit_private(lab, make(), privacy=SAMPLE),
        {"make": group_norm},
        {"make": ridge},
        "or a `RidgeClassifier` with `unit_norm=True`.",
        argument="unit",
    ),
    "methods at sample level": Row(
        lambda lab, **words: fit_private(lab, ridge(), privacy=SAMPLE, **words),
        {"callbacks": [Replay(5)]},
        {"callbacks": []},
        'Remove the methods, or use `unit="client"`.',
        argument="callbacks",
    ),
    "ledger of another unit": Row(
        fit_with_ledger_of_unit,
        {"unit": "sample"},
        {"unit": "client"},
        "Use the unit of the ledger, or use another file as `ledger` if the data is other data.",
        InvalidStateError,
        argument="unit",
    ),
    "history at sample level": Row(
        lambda lab, **words: fit_private(
            lab, ridge(), privacy=SAMPLE, stream=lab.stream(scenario=ClassIncremental(2, 1, **words), num_clients=2)
        ),
        {"history": "seen"},
        {"history": "round"},
        "Leave `history` out of the scenario's arguments.",
        argument="history",
    ),
    "shared samples at sample level": Row(
        lambda lab, unit: count_shared(unit),
        {"unit": "sample"},
        {"unit": "client"},
        'Use a partition that divides the samples, or use `unit="client"`.',
        argument="unit",
    ),
    "noise of indicators": Row(
        lambda lab, **words: PrivacyAccount(private(clip=AdaptiveClip(**words))).start(4, 1.0, 1),
        {"indicator_noise": 0.5},
        {"indicator_noise": None},
        "Leave `indicator_noise` out for the default.",
        argument="indicator_noise",
    ),
    "ledger with a damaged line": Row(
        read_ledger,
        {"line": b"{}\n" + CHARGE},
        {"line": CHARGE},
        "Restore the file from a backup. Without the ledger, the privacy budget is unknown.",
        DamagedFileError,
    ),
    "ledger without releases": Row(
        lambda lab, number: write_ledger(lab, number).check_contains(2, "other"),
        {"number": 1},
        {"number": 2},
        "Restore the file from a backup, or start without `ckpt_path`.",
        InvalidStateError,
        argument="ledger",
    ),
    "spent budget": Row(
        fit_with_spent_budget,
        {"epsilon": 1.0},
        {"epsilon": 2.0},
        "Increase `epsilon` or `noise_multiplier`",
        InvalidStateError,
        argument="epsilon",
    ),
    "spent budget with more noise": Row(
        fit_with_spent_budget,
        {"epsilon": 1.01, "noise_multiplier": 1.0},
        {"noise_multiplier": 100.0},
        "Increase `epsilon` or `noise_multiplier`, or use another file as `ledger` if the data is other data.",
        InvalidStateError,
        argument="epsilon",
    ),
    "fixed number of clients with privacy": Row(
        make_strategy,
        {"participation": 0.3},
        {"participation": Poisson(0.3)},
        "Sample each client independently, for example with `participation=Poisson(0.3)`.",
        argument="participation",
    ),
    "weights with privacy": Row(
        make_strategy,
        {"client_weights": "samples"},
        {"client_weights": None},
        "Remove `client_weights`.",
        argument="client_weights",
    ),
    "swarm with privacy": Row(make_strategy, {"swarm": Swarm()}, {"swarm": None}, "Remove `swarm`.", argument="swarm"),
    "own noise with privacy": Row(
        make_strategy,
        {"upload_transforms": [AddsNoise()]},
        {"upload_transforms": []},
        "Remove `AddsNoise`.",
        argument="upload_transforms",
    ),
    "integers with privacy": Row(
        lambda lab, **words: fit_private(lab, HalfIntegers(), **words),
        {"reductions": {}},
        {"reductions": {"count": "local"}},
        'Set `reductions={"count": "local"}` of the strategy.',
        argument="reductions",
    ),
    "batch normalization with privacy": Row(
        lambda lab, make: fit_private(lab, make()),
        {"make": batch_norm},
        {"make": group_norm},
        "Replace batch normalization by group normalization",
        argument="reductions",
    ),
    "local batch normalization with privacy": Row(
        lambda lab, **words: fit_private(lab, batch_norm(), **words),
        {"reductions": {}},
        {"reductions": LOCAL},
        '`reductions={"model.1.running_mean": "local"}` of the strategy.',
        argument="reductions",
    ),
    "changed frozen parameter with privacy": Row(
        lambda lab, requires_grad: fit_private(lab, Changing(requires_grad)),
        {"requires_grad": False},
        {"requires_grad": True},
        "Set `requires_grad` to True for parameters that training changes.",
        argument="requires_grad",
    ),
    "compression with noise of clients": Row(
        lambda lab, noise: fit_private(lab, privacy=private(noise=noise), compression=TopK(0.1)),
        {"noise": "client"},
        {"noise": "server"},
        'Remove `compression`, or use `noise="server"`.',
        argument="compression",
    ),
    "method with uploads with privacy": Row(
        lambda lab, **words: fit_private(lab, **words),
        {"callbacks": [FedNova()]},
        {"callbacks": [FedProx(0.1)]},
        "Remove `FedNova`, or remove `privacy`.",
        argument="callbacks",
    ),
    "method that reads client states with privacy": Row(
        lambda lab, **words: fit_private(lab, **words),
        {"callbacks": [FedCBDR(5)]},
        {"callbacks": []},
        "Remove `FedCBDR`, or remove `privacy`.",
        argument="callbacks",
    ),
    "early stopping with privacy": Row(
        lambda lab, **words: fit_private(lab, **words),
        {"callbacks": [EarlyStopping("train/loss")]},
        {"callbacks": []},
        "Remove the callback, or remove `monitor`.",
        argument="monitor",
    ),
    "plateaus with privacy": Row(
        lambda lab, scheduler: fit_private(lab, Scheduled(scheduler)),
        {"scheduler": ReduceLROnPlateau},
        {"scheduler": lambda optimizer: StepLR(optimizer, 1)},
        "Use another scheduler.",
        argument="monitor",
    ),
}
