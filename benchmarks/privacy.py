"""Accuracy and cost of differential privacy on digits.

    python benchmarks/privacy.py

100 clients with about 14 digits each train an MLP 64-64-10 with client-level privacy, and a ridge regression on pixels
with sample-level privacy. The settings of the MLP are selected on validation samples with other seeds than those of the
table. The last table compares the processor time of a fit with and without privacy. Run nothing else on the machine.
"""

import argparse
import itertools
import logging
import platform
import statistics
import time
import warnings

import torch
from round_overhead import Clock, trainer_of
from torch import nn

from lightning_fcl import Classifier, DifferentialPrivacy, FederatedStrategy, FederatedStream, RidgeClassifier
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.models import MLP

DELTA = 1e-5
EPSILONS = (0.5, 1, 2, 4, 8, None)
SEARCH_SEEDS = (100, 101)
GRID = [*itertools.product((30, 60), (0.3, 0.5, 1.0), (2, 5))]


class Pixels(nn.Module):
    """A network whose features are the pixels minus 0.3."""

    features = 64

    def embed(self, x):
        """Return features of shape (batch, 64)."""
        return x.flatten(1) - 0.3


def fit(task, stream, privacy, seed, local_epochs=1):
    """Train a task, and return the seconds of processor time per round, without the first round."""
    stream.setup("fit")
    clock, rounds = Clock(time.process_time), stream.plan.num_rounds
    strategy = FederatedStrategy(privacy=privacy, local_epochs=local_epochs, client_weights="uniform", seed=seed)
    trainer_of(clock, rounds - 1, strategy).fit(task, datamodule=stream)
    return (clock.end - clock.start) / (rounds - 1) if rounds > 1 else None


@torch.no_grad()
def accuracy(task, stream, rows):
    """Return the accuracy on some samples of the stream."""
    x, y = stream.get_samples(rows)
    return float((task.eval()(x).argmax(dim=1) == y).float().mean())


def train_network(epsilon, settings, seed):
    """Train the MLP. Return the accuracy on the validation samples and on the test samples, and the processor time."""
    rounds, clip, local_epochs = settings
    torch.manual_seed(seed)
    stream = FederatedStream("digits", Stationary(rounds), IID(100), Split(validation=0.1), batch_size=16, seed=seed)
    task = Classifier(MLP([64, 64, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.3))
    privacy = DifferentialPrivacy("client", DELTA, clip, epsilon) if epsilon else None
    seconds = fit(task, stream, privacy, seed, local_epochs)
    return accuracy(task, stream, stream.plan.validation), accuracy(task, stream, stream.plan.test), seconds


def train_ridge(epsilon, scenario, seed):
    """Train the ridge regression. Return the accuracy on the test samples, and the processor time."""
    stream = FederatedStream("digits", scenario, IID(100), batch_size=64, seed=seed)
    task = RidgeClassifier(Pixels(), 10, beta=0.1, unit_norm=True, min_samples=1)
    seconds = fit(task, stream, DifferentialPrivacy("sample", DELTA, epsilon=epsilon) if epsilon else None, seed)
    return accuracy(task, stream, stream.plan.test), seconds


def summary(values):
    """Return the mean and the standard deviation as text."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def network_table(seeds):
    """Print the accuracy of the MLP for each epsilon."""
    print("| epsilon | accuracy | rounds, clip, local epochs |\n|---|---|---|")
    for epsilon in (2, 8, None):
        scores = {
            settings: statistics.mean(train_network(epsilon, settings, seed)[0] for seed in SEARCH_SEEDS)
            for settings in GRID
            if epsilon or settings[1] == 1.0  # Without privacy, `clip` has no effect.
        }
        best = max(scores, key=scores.get)
        accuracies = [train_network(epsilon, best, seed)[1] for seed in seeds]
        rounds, clip, local_epochs = best
        print(f"| {epsilon or 'none'} | {summary(accuracies)} | {rounds}, {clip if epsilon else '-'}, {local_epochs} |")


def ridge_table(seeds):
    """Print the accuracy of the ridge regression for each epsilon."""
    print("| epsilon | one release | five tasks of two classes |\n|---|---|---|")
    for epsilon in EPSILONS:
        cells = [
            summary([train_ridge(epsilon, scenario, seed)[0] for seed in seeds])
            for scenario in (Stationary(1), ClassIncremental(5, 1))
        ]
        print(f"| {epsilon or 'none'} | {' | '.join(cells)} |")


def cost_table(repeats):
    """Print the ratio of the processor time of a round with and without privacy."""
    settings, networks, ridges = (30, 1.0, 5), [], []
    for seed in range(repeats):
        networks.append([train_network(epsilon, settings, seed)[2] for epsilon in (8, None)])
        ridges.append([train_ridge(epsilon, ClassIncremental(5, 4), seed)[1] for epsilon in (8, None)])
    for name, pairs in (("MLP, 100 clients, five local epochs", networks), ("ridge regression, 100 clients", ridges)):
        ratios = sorted(private / plain for private, plain in pairs)
        print(f"{name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("network", "ridge", "cost"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {options.seeds} seeds, delta {DELTA:g}\n")
    tables = {"network": network_table, "ridge": ridge_table, "cost": cost_table}
    for name, table in tables.items():
        if options.only in (None, name):
            print(f"\n{name}")
            table(options.seeds if name == "cost" else range(options.seeds))


if __name__ == "__main__":
    main()
