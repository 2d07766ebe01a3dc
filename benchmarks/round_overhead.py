"""Time of a round through `Trainer.fit` against a hand-written PyTorch loop, as a ratio, A B A B in one process.

    python benchmarks/round_overhead.py

Both do the same: download, one local epoch of SGD on every client, weighted mean. The first case is 100 clients with 15
digits each and an MLP 64-32-10, the second 20 clients with 600 windows each and the HAR-CNN (random signals shaped
as UCI HAR: time does not depend on values). Nothing else should run on the machine.
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
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.models import HARCNN, MLP


def digits_case():
    """100 clients x 15 digits, MLP 64-32-10, batches of 4."""
    x, y = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(y))[:1500]
    data = torch.tensor(x[chosen] / 16, dtype=torch.float32), torch.tensor(y[chosen])
    return data, np.arange(1500) % 100, MLP([64, 32, 10]), 10, 4


def har_case():
    """20 clients x 600 windows, HAR-CNN 196-16C_4M_1024D, batches of 32."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(12000, 6, 128, generator=generator), torch.randint(6, (12000,), generator=generator)
    return data, np.arange(12000) % 20, HARCNN(), 6, 32


def through_trainer(case, rounds):
    """Seconds per round inside one `Trainer.fit`, without its start."""
    (x, y), client, model, classes, batch_size = case

    class Clock(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:  # the first round warms up
                self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer, pl_module):
            self.end = time.perf_counter()

    stream = FederatedStream.from_arrays(
        x,
        y,
        client,
        scenario=ClassIncremental(experiences=1, rounds_per_experience=rounds + 1),
        split=Split(test=0.0),
        batch_size=batch_size,
        seed=0,
    )
    task = Classifier(copy.deepcopy(model), classes, lambda params: torch.optim.SGD(params, lr=0.01))
    clock = Clock()
    trainer = L.Trainer(
        strategy=FederatedStrategy(seed=0), max_epochs=rounds + 1, callbacks=[clock], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, datamodule=stream)
    return (clock.end - clock.start) / rounds


def by_hand(case, rounds):
    """Seconds per round of the loop that everyone writes first."""
    (x, y), client, model, _, batch_size = case
    owners = [torch.from_numpy(np.flatnonzero(client == c)) for c in range(int(client.max()) + 1)]
    data = [(x[rows], y[rows]) for rows in owners]
    local = copy.deepcopy(model).train()
    server = {name: value.clone() for name, value in local.state_dict().items()}
    start = 0.0
    for round in range(rounds + 1):
        if round == 1:
            start = time.perf_counter()
        sums = {name: torch.zeros_like(value) for name, value in server.items()}
        for inputs, labels in data:
            local.load_state_dict(server)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
            for rows in torch.randperm(len(labels)).split(batch_size):
                optimizer.zero_grad()
                F.cross_entropy(local(inputs[rows]), labels[rows]).backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] += value * (len(labels) / len(y))
        server = sums
    return (time.perf_counter() - start) / rounds


def compare(name, case, rounds, repeats):
    """Print the ratio of the two ways, taken in turns."""
    ours, loop = [], []
    for _ in range(repeats):
        ours.append(through_trainer(case, rounds))
        loop.append(by_hand(case, rounds))
    ratios = [a / b for a, b in zip(ours, loop, strict=True)]
    print(
        f"{name:28} Trainer.fit {1000 * statistics.median(ours):8.1f} ms/round, loop "
        f"{1000 * statistics.median(loop):8.1f} ms/round, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def main():
    """Run both cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.repeats} repeats, A B A B")
    compare("100 x 15 digits, MLP", digits_case(), 60, options.repeats)
    compare("20 x 600 windows, HAR-CNN", har_case(), 1, max(2, options.repeats // 2))


if __name__ == "__main__":
    main()
