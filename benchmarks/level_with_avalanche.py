"""Final accuracies of six methods in a plain Trainer and in Avalanche, each with random draws of its own.

    python benchmarks/level_with_avalanche.py --out runs/benchmarks

scikit-learn's digits in five experiences: two classes each, in an order drawn by Avalanche's `nc_benchmark` (split
digits, class-incremental), or all classes with the pixels in another order, drawn as Avalanche's `PermutedMNIST` draws
it (permuted digits, domain-incremental). No task is told at test time. For a seed both libraries get the same
experiences and the same initial weights; the order of batches, what is remembered and what is drawn of it is their own.
What a method's arguments mean on the other side is in `METHODS`. `tests/methods/test_level_with_avalanche.py` holds
that both end in the same weights where nothing is drawn.

It writes `level_with_avalanche.json`, each run's accuracy and processor seconds, and prints the table.
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
    # Avalanche has no factor 1/2, and squares the mean gradient of a batch, about 1 / BATCH of what samples have.
    "EWC": (lambda: [EWC(100.0, normalize=False)], lambda: [EWCPlugin(50.0 * BATCH, mode="online", decay_factor=1.0)]),
    "GEM": (lambda: [GEM(20, margin=0.5)], lambda: [GEMPlugin(20, memory_strength=0.5)]),
    # All that is remembered is the reference. Avalanche deals `sample_shape` out to the tasks, and takes them in turn.
    "A-GEM": (lambda: [AGEM(20)], lambda: [AGEMPlugin(20, sample_size=20 * (TASKS - 1))]),
}


def split_digits(seed):
    """The training and the test data of each experience: two classes."""
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
    """The training and the test data of each experience: all digits with their pixels in another order."""
    x, y, test_x, test_y = halves(seed)
    generator = np.random.RandomState(seed)
    orders = [torch.from_numpy(generator.permutation(x.shape[1])) for _ in range(TASKS)]
    return [((x[:, order], y), (test_x[:, order], test_y)) for order in orders]


def halves(seed):
    """Four fifths of the digits to train on, and the others."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=seed)
    x, test_x, y, test_y = (torch.from_numpy(part) for part in parts)
    return x.float(), y, test_x.float(), test_y


BENCHMARKS = {"split digits": split_digits, "permuted digits": permuted_digits}


def ours(model, name, experiences, epochs):
    """Train a `Classifier` in a Trainer for each experience; the method remembers from one to the next."""
    task, callbacks = Classifier(model, 10, sgd), METHODS[name][0]()
    for train, _ in experiences:
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=callbacks, logger=False, accelerator="cpu", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, DataLoader(TensorDataset(*train), batch_size=BATCH, shuffle=True))


def avalanche(model, name, experiences, epochs):
    """The same by Avalanche's strategy and plugin."""
    strategy = Naive(
        model=model, optimizer=sgd(model.parameters()), criterion=CrossEntropyLoss(), train_mb_size=BATCH,
        train_epochs=epochs, plugins=METHODS[name][1](), evaluator=None,
    )  # fmt: skip
    trains, tests = ([pair[i] for pair in experiences] for i in (0, 1))
    for experience in tensors_benchmark(trains, tests, task_labels=[0] * len(trains)).train_stream:
        strategy.train(experience)


LIBRARIES = {"ours": ours, "Avalanche": avalanche}


def sgd(params):
    """Without momentum, which Avalanche would carry from one experience to the next."""
    return torch.optim.SGD(params, lr=0.05)


def measure(benchmark, method, library, seed, epochs, tasks):
    """Mean test accuracy over the experiences in percent, and the processor's seconds for the training."""
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
    """A line of the table: both libraries' accuracies, the difference of the same seeds, and seconds of a run."""
    fcl_runs, avalanche_runs = (
        [run for run in runs if of(run) == (benchmark, method, library)] for library in LIBRARIES
    )
    gaps = [a["accuracy"] - b["accuracy"] for a, b in zip(fcl_runs, avalanche_runs, strict=True)]
    cells = [spread([run["accuracy"] for run in side]) for side in (fcl_runs, avalanche_runs)]
    times = [f"{statistics.median(run['seconds'] for run in side):.1f} s" for side in (fcl_runs, avalanche_runs)]
    return f"| {benchmark} | {method} | {cells[0]} | {cells[1]} | {spread(gaps, '+')} | {times[0]} | {times[1]} |"


def of(run):
    """What a run is a repetition of."""
    return run["benchmark"], run["method"], run["library"]


def spread(values, sign=""):
    """Mean and standard deviation."""
    return f"{statistics.mean(values):{sign}.1f} ± {statistics.stdev(values):.1f}"


def main():
    """Run all seeds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="repetitions, at least 2")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="two seeds, two experiences, one epoch: says nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="where the results go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seeds = 2 if options.quick else max(2, options.seeds)
    runs = []
    cases = list(product(range(seeds), BENCHMARKS, options.methods, LIBRARIES))  # in turns: A B A B
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
    print("| | method | ours | Avalanche | difference | seconds | Avalanche's |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for benchmark, method in product(BENCHMARKS, options.methods):
        print(row(runs, benchmark, method))


if __name__ == "__main__":
    main()
