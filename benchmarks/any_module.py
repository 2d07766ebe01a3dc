"""Time per round of modules with a custom `training_step`, compared with a hand-written PyTorch loop.

    python benchmarks/any_module.py

100 clients with digits train an MLP 64-32-10 on one full batch each. The variants are: plain, batch normalization,
dropout, dict batches (made by a custom dataset), and 4 to 26 digits per client instead of 15. In one more variant, 16
clients train a small residual network with batch normalization. The module is a plain LightningModule that does not
import this library. The script first checks that the weights of the Trainer and of the loop agree, except with
dropout. Finally, clients train sequentially. The script compares a step with a step of a plain Trainer, and measures
the additional time per client. Trainer and loop alternate. Run nothing else on the machine.
"""

import argparse
import copy
import logging
import statistics
import time
import warnings

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from round_overhead import Clock, trainer_of
from sklearn.datasets import load_digits
from torch import nn

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split


def mlp(*between):
    """Return an MLP for digits. The layers ``between`` follow the first layer."""
    return nn.Sequential(nn.Linear(64, 32), *between, nn.ReLU(), nn.Linear(32, 10))


class Residual(nn.Module):
    """A residual block of two convolutions with batch normalization."""

    def __init__(self, channels):
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers, *copy.deepcopy(layers[:2]))

    def forward(self, x):
        """Return the output, which has the shape of the input."""
        return F.relu(x + self.layers(x))


def residual_network():
    """Return a network with eight channels and two residual blocks."""
    start = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*start, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


CASES = {
    "plain": (100, mlp),
    "batch norm": (100, lambda: mlp(nn.BatchNorm1d(32))),
    "dropout": (100, lambda: mlp(nn.Dropout(0.2))),
    "dict batches": (100, mlp),
    "4 to 26 digits": (100, mlp),
    "residual network": (16, residual_network),
}


class Module(L.LightningModule):
    """A plain LightningModule that trains a network with SGD."""

    def __init__(self, network):
        super().__init__()
        torch.manual_seed(0)
        self.net = network()

    def training_step(self, batch, batch_idx):
        """Return the mean cross-entropy of a batch."""
        x, y = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        """Return the SGD optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Dicts(torch.utils.data.Dataset):
    """A dataset with a dict per digit."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index], "label": int(self.y[index])}


def digits(name):
    """Return the samples, labels and client ids of a case."""
    clients = CASES[name][0]
    sizes = np.resize(np.arange(4, 27), clients) if name == "4 to 26 digits" else np.full(clients, 15)
    x, y = load_digits(return_X_y=True)
    sample_indices = np.resize(np.random.default_rng(0).permutation(len(y)), sizes.sum())
    return (
        torch.tensor(x[sample_indices] / 16, dtype=torch.float32),
        torch.tensor(y[sample_indices]),
        np.repeat(range(clients), sizes),
    )


def through_trainer(name, rounds, batch_size=26, max_vectorized_clients="auto", timer=time.perf_counter):
    """Return the seconds per round of one `Trainer.fit`, without start-up and warm-up round, and the final weights."""
    x, y, owner = digits(name)
    data = (Dicts(x, y), None) if name == "dict batches" else (x, y)
    scenario = ClassIncremental(num_experiences=1, rounds_per_experience=rounds + 1)
    options = {"scenario": scenario, "split": Split(test=0.0), "batch_size": batch_size, "seed": 0}
    clock, module = Clock(timer), Module(CASES[name][1])
    trainer = trainer_of(clock, rounds, FederatedStrategy(seed=0, max_vectorized_clients=max_vectorized_clients))
    trainer.fit(module, datamodule=FederatedStream.from_arrays(*data, owner, **options))
    assert (trainer.strategy.num_vectorized_clients > 1) == (max_vectorized_clients == "auto"), (
        trainer.strategy.sequential_reason
    )
    return (clock.end - clock.start) / rounds, module.state_dict()


def by_hand(name, rounds):
    """Return the seconds per round of a hand-written loop over the clients, and the final weights."""
    x, y, owner = digits(name)
    clients = [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(CASES[name][0])]
    data = [(x[rows], y[rows]) for rows in clients]
    local = Module(CASES[name][1]).train()
    server = {entry: value.clone() for entry, value in local.state_dict().items()}
    start = 0.0
    for round_idx in range(rounds + 1):
        if round_idx == 1:
            start = time.perf_counter()
        sums = {entry: torch.zeros_like(value, dtype=torch.float32) for entry, value in server.items()}
        for batch in data:
            local.load_state_dict(server)
            optimizer = local.configure_optimizers()
            optimizer.zero_grad()
            local.training_step(batch, 0).backward()
            optimizer.step()
            for entry, value in local.state_dict().items():
                sums[entry] += value * (len(batch[1]) / len(y))
        server = {entry: value.to(server[entry].dtype) for entry, value in sums.items()}
    return (time.perf_counter() - start) / rounds, server


def compare(name, rounds, repeats):
    """Print the ratio of the Trainer's time to the loop's time. Trainer and loop alternate."""
    if name != "dropout":
        (_, trainer_state), (_, loop_state) = through_trainer(name, 2), by_hand(name, 2)
        assert all(
            torch.allclose(trainer_state[n].float(), loop_state[n].float(), atol=1e-5)
            for n in trainer_state
            if "num" not in n
        ), name
    seconds = [(through_trainer(name, rounds)[0], by_hand(name, rounds)[0]) for _ in range(repeats)]
    trainer_ms, loop_ms = (1000 * statistics.median(column) for column in zip(*seconds, strict=True))
    ratios = [a / b for a, b in seconds]
    print(
        f"{name:16} Trainer.fit {trainer_ms:8.1f} ms per round, loop {loop_ms:8.1f} ms, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def plain_step(rounds):
    """Return the seconds per step of a plain Trainer. Like the federation, this Trainer uses a data module."""
    x, y, _ = digits("plain")
    data = L.LightningDataModule.from_datasets(torch.utils.data.TensorDataset(x, y), batch_size=2, num_workers=0)
    clock = Clock()
    trainer_of(clock, rounds, "auto").fit(Module(mlp), datamodule=data)
    return (clock.end - clock.start) / rounds / len(data.train_dataloader())


def compare_one_at_a_time(rounds, repeats):
    """Print two values of sequential training.

    The first value is the time of a step, divided by the time of a plain Trainer's step. The second value is the time
    of a client in a round in addition to the client's steps.
    """
    steps, besides = [], []
    for _ in range(repeats):
        one_step_seconds, eight_step_seconds = (
            through_trainer("plain", rounds, size, 1)[0] / CASES["plain"][0] for size in (15, 2)
        )
        step_seconds, plain_step_seconds = (eight_step_seconds - one_step_seconds) / 7, plain_step(rounds)
        steps.append(step_seconds / plain_step_seconds)
        besides.append(1000 * (one_step_seconds - step_seconds))
    print(
        f"sequential training: a step takes {statistics.median(steps):.3f} times as long as a plain "
        f"Trainer's step ({min(steps):.3f} to {max(steps):.3f}), a client takes {statistics.median(besides):.2f} ms in "
        "addition to its steps",
        flush=True,
    )


def main():
    """Compare all cases, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="run few rounds to test the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    repeats = 1 if options.quick else options.repeats
    print(f"torch {torch.__version__}, {options.threads} thread(s), {repeats} repeat(s). The engines alternate.")
    for name in CASES:
        compare(name, 3 if options.quick else 100, repeats)
    compare_one_at_a_time(2 if options.quick else 5, repeats)


if __name__ == "__main__":
    main()
