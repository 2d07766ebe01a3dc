"""Final accuracy of six methods in a plain Trainer and in Avalanche. Each library draws its own random numbers.

    python benchmarks/level_with_avalanche.py --out runs/benchmarks

The data are scikit-learn's digits in five experiences. There are two benchmarks. Split digits (class-incremental) has
two classes per experience, in the order of Avalanche's `nc_benchmark`. Permuted digits (domain-incremental) has all
classes in each experience, with the pixels permuted as in Avalanche's `PermutedMNIST`. Predictions do not use the task
id. For each seed, both libraries get the same experiences and the same initial weights. Each library draws the order of
batches and the replay samples itself. For fine-tuning (`naive`) and LwF, both libraries draw the same order.
`METHODS` lists the equivalent arguments of the two libraries.
`tests/methods/test_level_with_avalanche.py` tests that both libraries give the same weights on the same batches and the
same stored samples.

The script writes the accuracy and the processor time of each run to `level_with_avalanche.json`, and prints the table.
"""

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_fcl import Classifier, __version__
from lightning_fcl.callbacks import AGEM, EWC, GEM, LwF, Replay
from lightning_fcl.models import MLP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from avalanche.benchmarks import nc_benchmark, tensors_benchmark
    from avalanche.training import Naive
    from avalanche.training.plugins import AGEMPlugin, EWCPlugin, GEMPlugin, LwFPlugin, ReplayPlugin

TASKS, BATCH = 5, 16
EPOCHS = {"split digits": 5, "permuted digits": 2}
METHODS = {
    "naive": (lambda: [], lambda: []),
    "Replay": (lambda: [Replay(100)], lambda: [ReplayPlugin(100)]),
    "LwF": (lambda: [LwF(1.0, temperature=2.0)], lambda: [LwFPlugin(1.0, temperature=2.0)]),
    # Avalanche's penalty has no factor 1/2, so its strength is 50 instead of 100. Avalanche squares the mean
    # gradient of a batch, which is about 1 / BATCH of the mean of the squared gradients of single samples.
    "EWC": (lambda: [EWC(100.0, normalize=False)], lambda: [EWCPlugin(50.0 * BATCH, mode="online", decay_factor=1.0)]),
    "GEM": (lambda: [GEM(20, margin=0.5)], lambda: [GEMPlugin(20, memory_strength=0.5)]),
    # The reference gradient uses all stored samples. Avalanche divides `sample_size` by the number of tasks, and takes
    # the stored samples of each task in order.
    "A-GEM": (lambda: [AGEM(20)], lambda: [AGEMPlugin(20, sample_size=20 * (TASKS - 1))]),
}


def split_digits(seed):
    """Return a pair (training data, test data) for each experience. Each experience has two classes."""
    x, y, test_x, test_y = halves(seed)
    classes = nc_benchmark(
        TensorDataset(x, y), TensorDataset(test_x, test_y), TASKS, task_labels=False, seed=seed
    ).original_classes_in_exp
    return [
        ((x[here], y[here]), (test_x[there], test_y[there]))
        for own in classes
        for here, there in [(torch.isin(y, torch.tensor([*own])), torch.isin(test_y, torch.tensor([*own])))]
    ]


def permuted_digits(seed):
    """Return a pair (training data, test data) for each experience.

    Each experience has all digits, with a new permutation of the pixels.
    """
    x, y, test_x, test_y = halves(seed)
    generator = np.random.RandomState(seed)
    orders = [torch.from_numpy(generator.permutation(x.shape[1])) for _ in range(TASKS)]
    return [((x[:, order], y), (test_x[:, order], test_y)) for order in orders]


def halves(seed):
    """Return x and y of the training data (80 % of the digits), then x and y of the test data (20 %)."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=seed)
    x, test_x, y, test_y = (torch.from_numpy(part) for part in parts)
    return x.float(), y, test_x.float(), test_y


BENCHMARKS = {"split digits": split_digits, "permuted digits": permuted_digits}


def ours(model, name, experiences, epochs):
    """Train a `Classifier` with a new Trainer per experience. The method's state is kept from fit to fit."""
    task, callbacks = Classifier(model, 10, sgd), METHODS[name][0]()
    for train, _ in experiences:
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=callbacks, logger=False, accelerator="cpu", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, DataLoader(TensorDataset(*train), batch_size=BATCH, shuffle=True))


def avalanche(model, name, experiences, epochs):
    """Train a model on all experiences with Avalanche's `Naive` strategy and the plugin of a method."""
    strategy = Naive(
        model=model, optimizer=sgd(model.parameters()), criterion=CrossEntropyLoss(), train_mb_size=BATCH,
        train_epochs=epochs, plugins=METHODS[name][1](), evaluator=None,
    )  # fmt: skip
    trains, tests = ([pair[i] for pair in experiences] for i in (0, 1))
    for experience in tensors_benchmark(trains, tests, task_labels=[0] * len(trains)).train_stream:
        strategy.train(experience)


LIBRARIES = {"ours": ours, "Avalanche": avalanche}


def sgd(params):
    """Return SGD without momentum. With momentum, Avalanche would use the momentum of earlier experiences."""
    return torch.optim.SGD(params, lr=0.05)


def measure(benchmark, method, library, seed, epochs, tasks):
    """Return a dict with the ``accuracy`` (percent, mean over the experiences) and the processor ``seconds``."""
    experiences = BENCHMARKS[benchmark](seed)[:tasks]
    L.seed_everything(seed, verbose=False)
    model = MLP([64, 100, 10])
    start = time.process_time()
    LIBRARIES[library](model, method, experiences, epochs)
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(dim=1) == y).double().mean().item() for _, (x, y) in experiences]
    return {"accuracy": 100 * statistics.mean(right), "seconds": seconds}


def row(runs, benchmark, method):
    """Return a line of the table: both accuracies, their mean difference over the seeds, and both median times."""
    fcl_runs, avalanche_runs = (
        [run for run in runs if of(run) == (benchmark, method, library)] for library in LIBRARIES
    )
    gaps = [a["accuracy"] - b["accuracy"] for a, b in zip(fcl_runs, avalanche_runs, strict=True)]
    cells = [spread([run["accuracy"] for run in side]) for side in (fcl_runs, avalanche_runs)]
    times = [f"{statistics.median(run['seconds'] for run in side):.1f} s" for side in (fcl_runs, avalanche_runs)]
    return f"| {benchmark} | {method} | {cells[0]} | {cells[1]} | {spread(gaps, '+')} | {times[0]} | {times[1]} |"


def of(run):
    """Return the benchmark, the method and the library of a run."""
    return run["benchmark"], run["method"], run["library"]


def spread(values, sign=""):
    """Return a text with the mean and the standard deviation of the values, such as "91.2 ± 0.4"."""
    return f"{statistics.mean(values):{sign}.1f} ± {statistics.stdev(values):.1f}"


def main():
    """Run all seeds, write the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="set the number of seeds, at least 2")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="test the script: two seeds, two experiences, one epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="set the output folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seeds = 2 if options.quick else max(2, options.seeds)
    runs = []
    # The libraries alternate, so that both are measured under the same load of the machine.
    cases = list(product(range(seeds), BENCHMARKS, options.methods, LIBRARIES))
    for seed, benchmark, method, library in tqdm(cases, unit="run"):
        epochs, tasks = (1, 2) if options.quick else (EPOCHS[benchmark], TASKS)
        result = measure(benchmark, method, library, seed, epochs, tasks)
        runs.append({"benchmark": benchmark, "method": method, "library": library, "seed": seed, **result})
    versions = {"lightning-fcl": __version__} | {
        name: version(name) for name in ("avalanche-lib", "torch", "lightning")
    }
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": platform.processor() or platform.machine(), "versions": versions, "runs": runs}
    (options.out / "level_with_avalanche.json").write_text(json.dumps(record, indent=1))
    print(", ".join(f"{name} {number}" for name, number in versions.items()) + f", {seeds} seeds, one thread")
    print("| | method | ours | Avalanche | difference | time, ours | time, Avalanche |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for benchmark, method in product(BENCHMARKS, options.methods):
        print(row(runs, benchmark, method))


if __name__ == "__main__":
    main()
