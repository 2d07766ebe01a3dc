"""What clients cost by their number: seconds to set up, seconds a round, and memory, each in a process of its own.

    python benchmarks/many_clients.py

Clients have 15 digits each, an MLP 64-32-10 and one full batch a round, as in `round_overhead.py`. Memory is the most
that the process takes over what it held with its data alone, before the stream was planned.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from round_overhead import digits_case

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split

ROUNDS = 5


def peak():
    """The most memory that this process has taken since `forget_peak`, in MiB; Linux tells."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def forget_peak():
    """Begin with what the process takes now."""
    Path("/proc/self/clear_refs").write_text("5")


class Clock(Callback):
    """When rounds end."""

    def __init__(self):
        self.ends = []

    def on_train_start(self, trainer, pl_module):
        """The first round begins."""
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer, pl_module):
        """A round ends."""
        self.ends.append(time.perf_counter())


def fit(x, y, owner, model, classes, rounds=ROUNDS):
    """Seconds of the stream's set-up, from `fit` to the first batch, and of a round."""
    stream = FederatedStream.from_arrays(
        x,
        y,
        owner,
        scenario=ClassIncremental(experiences=1, rounds_per_experience=rounds),
        split=Split(test=0.0),
        batch_size=15,
        seed=0,
    )
    begin = time.perf_counter()
    stream.setup("fit")
    planned, clock = time.perf_counter(), Clock()
    trainer = L.Trainer(
        strategy=FederatedStrategy(seed=0), max_epochs=rounds, callbacks=[clock], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(model, classes, lambda params: torch.optim.SGD(params, lr=0.01)), datamodule=stream)
    return planned - begin, clock.start - planned, (clock.ends[-1] - clock.ends[0]) / max(1, rounds - 1)


def measure(clients):
    """One number of clients, in this process."""
    (x, y), owner, model, classes, _ = digits_case(clients, 15)
    fit(x[:150], y[:150], owner[:150] % 10, model, classes, rounds=2)  # loads what is imported late
    forget_peak()
    before = peak()
    setup, start, round = fit(x, y, owner, model, classes)
    return {"setup": setup, "start": start, "round": round, "memory": peak() - before}


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(measure(options.one)))
        return
    print(f"torch {torch.__version__}, one thread, {ROUNDS} rounds")
    for clients in options.clients:
        command = [sys.executable, __file__, "--one", str(clients)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        values = json.loads(output.splitlines()[-1])
        print(
            f"{clients:6} clients: set-up {values['setup']:6.2f} s, start {values['start']:5.2f} s, "
            f"a round {1000 * values['round']:7.1f} ms, memory {values['memory']:6.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
