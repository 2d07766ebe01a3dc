"""Time and memory of reservoirs, compared with bare matrix products, reservoirpy, and sequential training.

    python benchmarks/reservoir.py             # the numbers of benchmarks/README.md
    python benchmarks/reservoir.py --quick     # small sizes, to test the script

In each comparison of times, this library and the alternative alternate in one process. Ratios are the median (lowest to
highest). If both must give equal results, the script compares the results before the timing. Memory is read from
Linux's `/proc`, in a separate process for each measurement. Run nothing else on the machine.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import altair as alt
import lightning.pytorch as L
import numpy as np
import reservoirpy
import torch
from lightning.pytorch.callbacks import LambdaCallback
from reservoirpy import ESN
from reservoirpy.nodes import Reservoir, Ridge
from scipy import sparse

from lightning_fcl import FederatedStrategy, FederatedStream, ReservoirClassifier
from lightning_fcl.callbacks import IntrinsicPlasticity
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.evaluation import charts
from lightning_fcl.models import EchoStateNetwork
from lightning_fcl.models.ridge import accumulate

BATCH, STEPS, UNITS, INPUTS, CLASSES = 128, 200, 300, 6, 4
BETA, LEAK = 1.0, 0.5


def network(units=UNITS, dtype=torch.float32):
    """Return a leaky reservoir with 10 % nonzero recurrent weights, which reservoirpy can store as a sparse matrix."""
    reservoir = EchoStateNetwork(INPUTS, units, leaking_rate=LEAK, recurrent_connectivity=0.1, seed=0)
    return reservoir.requires_grad_(False).to(dtype)


def sequences(count, steps=STEPS, seed=0):
    """Return random sequences and labels. The measured times do not depend on the values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, steps, INPUTS, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def seconds(function, *args):
    """Return the wall time in seconds of one call of a function."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


class Table:
    """A table with the columns metric, ours, alternative, ratio and target (stored as `aim`)."""

    def __init__(self, repeats):
        self.repeats = repeats
        self.rows = []

    def compare(self, metric, library_timer, alternative_timer, max_ratio=None, min_ratio=None):
        """Measure this library and the alternative, which alternate, and add a row.

        Pass ``max_ratio`` or ``min_ratio``.

        Args:
            metric: Description of the row.
            library_timer: Function that measures this library.
            alternative_timer: Function that measures the alternative.
            max_ratio: Largest accepted ratio of the library's time to the alternative's time.
            min_ratio: Smallest accepted ratio of the alternative's time to the library's time. If it is None,
                ``max_ratio`` is used.
        """
        # The first pair is a warm-up.
        pairs = [(library_timer(), alternative_timer()) for _ in range(self.repeats + 1)][1:]
        ratios = [a / b if min_ratio is None else b / a for a, b in pairs]
        middle = statistics.median(ratios)
        library_time, alternative_time = (
            f"{1000 * statistics.median(times):.1f} ms" for times in zip(*pairs, strict=True)
        )
        ratio = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        if min_ratio is None:
            self.add(metric, library_time, alternative_time, ratio, f"at most {max_ratio}", middle <= max_ratio)
        else:
            self.add(metric, library_time, alternative_time, ratio, f"at least {min_ratio}", middle >= min_ratio)

    def add(self, metric, library_value, alternative_value, ratio, aim, is_met):
        """Add a row, and print it."""
        names = ("metric", "ours", "alternative", "ratio", "aim")
        row = dict(
            zip(
                names,
                (metric, library_value, alternative_value, ratio, aim + ("" if is_met else ": missed")),
                strict=True,
            )
        )
        self.rows.append(row)
        print(f"| {' | '.join(row.values())} |", flush=True)


def forward(table):
    """Compare the time of a forward pass with the time of its matrix products alone."""
    reservoir, (x, _) = network(), sequences(BATCH)
    w_in, w = (weight.t().contiguous() for weight in reservoir.weights(0))
    state, out, flat = torch.randn(BATCH, UNITS), torch.empty(BATCH, UNITS), x.reshape(-1, INPUTS)
    drive = torch.empty(len(flat), UNITS)

    def products():
        torch.mm(flat, w_in, out=drive)
        for _ in range(STEPS):
            torch.mm(state, w, out=out)

    metric = f"forward, {BATCH} x {STEPS} steps, {UNITS} units; alternative: its matrix products"
    table.compare(metric, lambda: seconds(reservoir, x), lambda: seconds(products), max_ratio=1.6)


def fit(reservoir, x, y):
    """Compute all states, fit the ridge readout, and return its weights."""
    task = ReservoirClassifier(reservoir, CLASSES, BETA)
    task.accumulate_samples(task.readout.A[None], task.readout.B[None], x, y, [len(x)])
    task.readout.solve()
    return task.readout.weight


def against_reservoirpy(table):
    """Compare this library's times for states and readout with reservoirpy's, after a check that the results agree."""
    reservoir, (x, y) = network(), sequences(BATCH)
    w_in, w = (weight.double().numpy() for weight in reservoir.weights(0))
    series, targets = x.double().numpy(), np.repeat(np.eye(CLASSES)[y][:, None], STEPS, axis=1)

    def run(weights, workers):
        node = Reservoir(W=weights, Win=w_in, lr=LEAK)
        # A new node starts each sequence from the state 0.
        return node.run(series, workers=workers)

    forms = {"dense": w, "CSR": sparse.csr_matrix(w)}
    ways = [(form, workers) for form in forms for workers in sorted({1, torch.get_num_threads()})]
    seconds_by_way = {way: min(seconds(run, forms[way[0]], way[1]) for _ in range(3)) for way in ways}
    form, workers = min(seconds_by_way, key=seconds_by_way.get)
    summary = ", ".join(f"{f} workers={n} {1000 * spent:.0f} ms" for (f, n), spent in seconds_by_way.items())
    print(f"Time of each setting of reservoirpy: {summary}", file=sys.stderr)

    difference = np.abs(run(forms[form], workers) - reservoir(x).numpy()).max()
    assert difference < 1e-4, f"states differ by {difference:.1e}"
    metric = f"forward; alternative: `Reservoir.run` of reservoirpy, {form}, workers={workers}"
    table.compare(metric, lambda: seconds(reservoir, x), lambda: seconds(run, forms[form], workers), min_ratio=4)

    def theirs():
        model = ESN(Reservoir(W=forms[form], Win=w_in, lr=LEAK), Ridge(ridge=BETA, fit_bias=False))
        return model.fit(series, targets, workers=workers).readout.Wout

    expected = torch.from_numpy(theirs()).t()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        solution = fit(network(dtype=dtype), x, y)
        difference = float((solution - expected).norm() / expected.norm())
        assert difference < tolerance, f"readouts differ by {difference:.1e} in {dtype}"
    metric = f"fit, states and ridge; alternative: `ESN.fit` of reservoirpy, {form}, workers={workers}"
    table.compare(metric, lambda: seconds(fit, reservoir, x, y), lambda: seconds(theirs), min_ratio=1)


def federation(clients, size, plastic, units=UNITS, dtype=torch.float32):
    """Return the seconds and the resulting readout of one IncFed round, or of a FedIP round plus a readout round."""
    times = []
    clock = LambdaCallback(
        on_train_start=lambda *_: times.append(time.perf_counter()),
        on_train_epoch_end=lambda *_: times.append(time.perf_counter()),
    )
    # Each client has one sequence, and every other client has a second one.
    owner = np.concatenate([np.arange(clients), np.arange(0, clients, 2)])
    x, y = sequences(len(owner))
    rounds = 2 if plastic else 1
    stream = FederatedStream.from_arrays(
        x,
        y,
        owner,
        scenario=ClassIncremental(num_experiences=1, rounds_per_experience=rounds),
        split=Split(test=0.0),
        batch_size=32,
        classes=list(map(str, range(CLASSES))),
        seed=0,
    )
    task = ReservoirClassifier(network(units, dtype), CLASSES, BETA, min_samples=1)
    trainer = L.Trainer(
        strategy=FederatedStrategy(max_vectorized_clients=size, seed=0),
            max_epochs=rounds, logger=False, accelerator="cpu",
        callbacks=[clock, *([IntrinsicPlasticity()] if plastic else [])],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, datamodule=stream)
    return times[-1] - times[0], task.readout.weight.clone()


def cohorts(table, clients):
    """Compare the time of vectorized training with the time of sequential training."""
    for plastic, name in ((False, "one IncFed round"), (True, "a FedIP round and its readout")):
        cohort_readout, sequential_readout = (
            federation(clients, size, plastic, dtype=torch.float64)[1] for size in ("auto", 1)
        )
        difference = float((cohort_readout - sequential_readout).abs().max())
        assert difference < 1e-9, f"readouts differ by {difference:.1e}"
        metric = f"{name}, {clients} clients with 1-2 sequences; alternative: max_vectorized_clients=1"
        cohort_timer, sequential_timer = (
            (lambda size=size, p=plastic: federation(clients, size, p)[0]) for size in ("auto", 1)
        )
        table.compare(metric, cohort_timer, sequential_timer, min_ratio=2.5)


def gram(table, rows, units):
    """Compare `accumulate` on single-precision states with a bare matrix product of double-precision states."""
    states, targets = torch.randn(rows, units), torch.randn(rows, CLASSES)
    wide, product = states.double(), torch.empty(units, units, dtype=torch.float64)
    a, b = (torch.zeros(size, units, dtype=torch.float64) for size in (CLASSES, units))
    accumulate(a, b, states, targets)
    assert torch.allclose(b, wide.t() @ wide, rtol=1e-12, atol=1e-8)
    metric = f"`accumulate`, {rows:,} x {units} states; alternative: S^T S alone, converted before"
    product_function = partial(torch.mm, wide.t(), wide, out=product)
    table.compare(
        metric, lambda: seconds(accumulate, a, b, states, targets), lambda: seconds(product_function), min_ratio=0.7
    )


def add_sequences(count):
    """Return the additional peak memory in MiB while the statistics of sequences are added batch by batch."""

    def status(name):
        return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024

    task = ReservoirClassifier(network(), CLASSES, BETA)
    # A process inherits `ru_maxrss` from its parent and cannot reset the value, so the script uses the peak in `/proc`.
    Path("/proc/self/clear_refs").write_text("5")
    initial_memory = status("VmRSS")
    for start in range(0, count, BATCH):
        x, y = sequences(min(BATCH, count - start), seed=start)
        task.accumulate_samples(task.readout.A[None], task.readout.B[None], x, y, [len(x)])
    return status("VmHWM") - initial_memory


def memory(table, counts):
    """Add a row with the peak memory for several numbers of sequences, in increasing order."""
    runs = [[sys.executable, __file__, "--add", str(count)] for count in counts]
    peaks = [float(subprocess.run(run, capture_output=True, check=True, text=True).stdout.split()[-1]) for run in runs]
    growth = max(peaks) - peaks[0]
    metric = f"memory to add {', '.join(f'{n:,}' for n in counts)} sequences; alternative: all states of the last"
    peak_values, states = ", ".join(f"{peak:.0f}" for peak in peaks), counts[-1] * STEPS * UNITS * 4 / 2**20
    table.add(
        metric, f"{peak_values} MiB", f"{states:.0f} MiB", f"{growth:+.0f} MiB", "flat: at most +32 MiB", growth <= 32
    )


def scaling(out, quick):
    """Measure and draw the time by the number of units, clients and steps.

    Returns:
        A list of curves. A curve is a dict: ``against`` (the varied quantity), ``sizes`` (its values), ``what`` (the
        measured quantity) and ``values`` (one measured value per size).
    """

    def middle(function):
        return statistics.median([function() for _ in range(2 if quick else 4)][1:])

    def states(units, steps):
        reservoir, (x, _) = network(units), sequences(BATCH, steps)
        return middle(lambda: seconds(list, (None for _ in reservoir.blocks(x))))

    panels = [
        ("units", "microseconds per sequence and step", lambda n: 1e6 * states(n, 50) / BATCH / 50,
         [100, 200, 500, 1000, 2000], 2),
        ("clients, 1-2 sequences each", "seconds of an IncFed round, 100 units",
         lambda n: middle(lambda: federation(n, "auto", False, units=100)[0]), [10, 100, 1000], 1),
        ("steps", f"seconds of {BATCH} sequences, {UNITS} units", lambda n: states(UNITS, n),
         [50, 100, 200, 400, 800, 1600, 3200], 1),
    ]  # fmt: skip
    curves, data, parts = [], {}, []
    for name, quantity, function, sizes, power in panels:
        sizes = sizes[: 3 if quick else None]
        times = [function(size) for size in sizes]
        curves.append({"against": name, "sizes": sizes, "what": quantity, "values": times})
        label = "proportional to the square" if power == 2 else "proportional"
        expected = [times[-1] * (size / sizes[-1]) ** power for size in sizes]
        values_by_line = {"measured": times, label: expected}
        data[name] = [
            {"line": line, "size": size, "value": value}
            for line, values in values_by_line.items()
            for size, value in zip(sizes, values, strict=True)
        ]
        x = alt.X("size:Q", title=name, scale=alt.Scale(type="log"), axis=alt.Axis(values=sizes))
        _, *layers = charts.small_multiples(
            charts.get_chart(name).encode(x=x), [*values_by_line], quantity, alt.Scale(type="log")
        )
        parts.append(alt.layer(*layers).properties(width=250, height=250))
    whole = alt.hconcat(*parts).resolve_scale(color="independent", shape="independent", strokeDash="independent")
    charts.write_png(out / "reservoir_scaling.png", charts.spec(whole, **data))
    return curves


def main():
    """Measure, print the table, and write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use small sizes to test the script")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    # The script starts itself with `--add` to measure memory in a separate process.
    parser.add_argument("--add", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.add:
        print(add_sequences(options.add))
        return
    if options.quick:
        global BATCH
        BATCH = 16
    options.out.mkdir(parents=True, exist_ok=True)
    table = Table(3 if options.quick else 11)
    versions = {"torch": torch.__version__, "numpy": np.__version__, "reservoirpy": reservoirpy.__version__}
    machine = {"machine": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    machine |= {"repeats": table.repeats, **versions}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| metric | ours | alternative | ratio | target |\n| --- | ---: | ---: | ---: | --- |")
    forward(table)
    against_reservoirpy(table)
    cohorts(table, 20 if options.quick else 100)
    for units in (300, 1000):
        gram(table, 6_400 if options.quick else 25_600, units)
    memory(table, [256, 512, 1024] if options.quick else [1_000, 4_000, 16_000])
    curves = scaling(options.out, options.quick)
    result = {**machine, "rows": table.rows, "scaling": curves}
    (options.out / "reservoir.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
