"""Time per round of `Trainer.fit`, compared with a hand-written PyTorch loop and a bare `vmap`.

    python benchmarks/round_overhead.py

`Trainer.fit` and the loop do the same: download, one local epoch of SGD on every client, weighted mean. The cases are:

- 100 clients with 15 digits each, an MLP 64-32-10, batches of 4,
- 100 and 1,000 such clients with one full batch each,
- 100 clients with one full batch each, and 512 or 2,048 hidden units,
- 20 clients with 600 windows each, and the HAR-CNN. The signals are random in the shape of UCI HAR, because the time
  does not depend on the values.

In cases with one full batch per client, a bare `vmap` computes the same step: gradient, SGD and mean. The input tensors
of `vmap` are stacked before the timing. In these cases, the script first checks that the final weights agree.
"Lightning alone" is an epoch of a Trainer with one step on one vector and one logged number. A round with one
vectorized step has the same number of steps and logged numbers. The implementations alternate. Run nothing else on the
machine.
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
from torch.func import functional_call, grad, vmap

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.models import HARCNN, MLP


def digits_case(clients, batch_size, width=32):
    """Return a case of clients with 15 digits each and an MLP 64-width-10. Above 119 clients, digits are reused.

    Returns:
        A pair of samples and labels, client ids, model, number of classes, and batch size.
    """
    x, y = load_digits(return_X_y=True)
    sample_indices = np.random.default_rng(0).permutation(len(y))
    sample_indices = np.resize(sample_indices, 15 * clients)
    data = torch.tensor(x[sample_indices] / 16, dtype=torch.float32), torch.tensor(y[sample_indices])
    return data, np.arange(len(sample_indices)) % clients, MLP([64, width, 10]), 10, batch_size


def har_case():
    """Return a case of 20 clients with 600 windows each, the HAR-CNN 196-16C_4M_1024D, and batches of 32.

    For the order of the returned values, see `digits_case`.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(12000, 6, 128, generator=generator), torch.randint(6, (12000,), generator=generator)
    return data, np.arange(12000) % 20, HARCNN(), 6, 32


class Clock(Callback):
    """A callback that times a fit from the start of the second epoch to the end of the last epoch.

    The first epoch is a warm-up.

    Args:
        timer: Function that returns the current time in seconds.
    """

    def __init__(self, timer=time.perf_counter):
        self.now = timer

    def on_train_epoch_start(self, trainer, pl_module):
        """Start the clock in the second epoch."""
        if trainer.current_epoch == 1:
            self.start = self.now()

    def on_train_epoch_end(self, trainer, pl_module):
        """Store the current time. The last epoch overwrites earlier values."""
        self.end = self.now()


def trainer_of(clock, rounds, strategy):
    """Return a Trainer that writes no logs or checkpoints, and prints no progress bar or model summary."""
    return L.Trainer(
        strategy=strategy, max_epochs=rounds + 1, callbacks=[clock], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def through_trainer(case, rounds, timer=time.perf_counter):
    """Return the seconds per round of one `Trainer.fit`, without start-up and warm-up round, and the final weights."""
    (x, y), client, model, classes, batch_size = case
    stream = FederatedStream.from_arrays(
        x,
        y,
        client,
        scenario=ClassIncremental(num_experiences=1, rounds_per_experience=rounds + 1),
        split=Split(test=0.0),
        batch_size=batch_size,
        seed=0,
    )
    task = Classifier(copy.deepcopy(model), classes, lambda params: torch.optim.SGD(params, lr=0.01))
    clock = Clock(timer)
    trainer_of(clock, rounds, FederatedStrategy(seed=0)).fit(task, datamodule=stream)
    return (clock.end - clock.start) / rounds, task.model.state_dict()


class OneVector(L.LightningModule):
    """A minimal LightningModule: one parameter vector, and one logged number."""

    def __init__(self, size):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(size))

    def training_step(self, batch, batch_idx):
        """Return the loss, and log it."""
        loss = self.vector.sum()
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        """Return the SGD optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def lightning_alone(case, rounds):
    """Return the seconds per epoch of a Trainer with almost no computation, and {} in place of final weights.

    The module has the same number of parameters as the model of the case.
    """
    clock = Clock()
    trainer = trainer_of(clock, rounds, strategy="auto")
    module = OneVector(sum(value.numel() for value in case[2].parameters()))
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    return (clock.end - clock.start) / rounds, {}


def by_hand(case, rounds):
    """Return the seconds per round of a hand-written loop over the clients, and the final weights."""
    (x, y), client, model, _, batch_size = case
    owners = [torch.from_numpy(np.flatnonzero(client == c)) for c in range(int(client.max()) + 1)]
    data = [(x[rows], y[rows]) for rows in owners]
    local = copy.deepcopy(model).train()
    server = {name: value.clone() for name, value in local.state_dict().items()}
    start = 0.0
    for round_idx in range(rounds + 1):
        if round_idx == 1:
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
    return (time.perf_counter() - start) / rounds, server


def by_vmap(case, rounds):
    """Return the seconds per round of a bare `vmap`, and the final weights. The time is a lower bound for training."""
    (x, y), client, model, _, _ = case
    rows = torch.from_numpy(np.stack([np.flatnonzero(client == c) for c in range(int(client.max()) + 1)]))
    x, y = x[rows], y[rows]
    model = copy.deepcopy(model).train()
    stacked = {name: value.detach().expand(len(rows), *value.shape).clone() for name, value in model.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    gradient = vmap(grad(loss))
    start = 0.0
    for round_idx in range(rounds + 1):
        if round_idx == 1:
            start = time.perf_counter()
        for name, value in gradient(stacked, x, y).items():
            parameter = stacked[name].sub_(value, alpha=0.01)
            parameter.copy_(parameter.mean(dim=0).expand_as(parameter))
    return (time.perf_counter() - start) / rounds, {name: value[0] for name, value in stacked.items()}


def compare(name, case, rounds, repeats, vectorized=False):
    """Print the ratio of the Trainer's time to the time of each alternative. All implementations alternate."""
    ways = {"loop": by_hand, **({"bare vmap": by_vmap} if vectorized else {})}
    if vectorized:
        _, trainer_state = through_trainer(case, 3)
        for way in ways.values():
            _, way_state = way(case, 3)
            assert all(torch.allclose(way_state[n], value, atol=1e-5) for n, value in trainer_state.items()), (
                "the implementations give different weights"
            )
        ways["Lightning alone"] = lightning_alone
    seconds = {"Trainer.fit": [], **{way: [] for way in ways}}
    for _ in range(repeats):
        for way, run in {"Trainer.fit": through_trainer, **ways}.items():
            seconds[way].append(run(case, rounds)[0])
    trainer_seconds = seconds.pop("Trainer.fit")
    print(f"{name:28} Trainer.fit {1000 * statistics.median(trainer_seconds):8.1f} ms per round", end="")
    for way, way_seconds in seconds.items():
        ratios = [a / b for a, b in zip(trainer_seconds, way_seconds, strict=True)]
        print(
            f", {way} {1000 * statistics.median(way_seconds):8.1f} ms, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            end="",
        )
    print(flush=True)


def main():
    """Compare all cases, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--digits", action="store_true", help="skip the HAR-CNN, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="run few rounds of digits to test the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    repeats, round_divisor = (1, 10) if options.quick else (options.repeats, 1)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {repeats} repeat(s). The engines alternate.")
    compare("100 x 15 digits, MLP", digits_case(100, 4), 60 // round_divisor, repeats)
    compare("100 x 15, one batch", digits_case(100, 15), 200 // round_divisor, repeats, vectorized=True)
    compare("100 x 15, 512 units", digits_case(100, 15, 512), 60 // round_divisor, repeats, vectorized=True)
    compare("100 x 15, 2,048 units", digits_case(100, 15, 2048), 20 // round_divisor, repeats, vectorized=True)
    compare("1,000 x 15, one batch", digits_case(1000, 15), 20 // round_divisor, repeats, vectorized=True)
    if options.digits or options.quick:
        return
    compare("20 x 600 windows, HAR-CNN", har_case(), 1, max(2, options.repeats // 2))


if __name__ == "__main__":
    main()
