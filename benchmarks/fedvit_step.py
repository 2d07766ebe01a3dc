"""Time of a FedViT step compared with the time of its gradients, and the size of the client state of four methods.

    OMP_NUM_THREADS=1 python benchmarks/fedvit_step.py

With ten past tasks, a step of the body of the 6-layer ViT (2.7 M parameters) needs eleven gradients: one of the batch,
and one of the stored images of each past task. The script measures the steps of a real `Trainer.fit` (Lightning's
loop, the hooks of the federation and the method, AdamW). After each step, a bare loop computes the same gradients for
the same samples and parameters. A batch has 32 images. Ten images of each past task are stored. A client with 2 to 5
classes of 25 to 50 images each stores a similar number with FedViT's default `rho=0.1`. Images are random, because the
time does not depend on the values. The time of the
projection is the time of the calls of `project` in the steps.

With `--out`, the script also trains a client on ten tasks with each method, and draws the size of the client state
after each task as `memory_with_tasks.png`. `--cpu` measures processor time, for a machine that runs other programs.
`--quick` uses a tiny ViT to test the script.
"""

import argparse
import logging
import statistics
import time
import warnings
from pathlib import Path

import altair as alt
import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import EWC, FedKNOW, FedViT, FedWEIT
from lightning_fcl.data.scenarios import FedViTScenario
from lightning_fcl.data.split import Split
from lightning_fcl.evaluation import charts
from lightning_fcl.methods import fedvit
from lightning_fcl.models import FedWEITNet, ViT

# TASKS: number of past tasks. BATCH: number of images of a batch, and of a task.
TASKS, BATCH = 10, 32
# Fraction of the 32 images of a task that is stored: ten images.
KEPT = 0.3
DECOMPOSED = {"model.tasks.*": "local", "model.net.head.*": "local", "model.net.body.*weight": "sparse_mean"}
TINY = {"width": 24, "depth": 2, "num_heads": 2, "patch_size": 16}


class Times(Callback):
    """A callback that times the body steps of the last round, the projections, and a bare loop after each step."""

    def __init__(self, method, stream, clock, repeats):
        self.method, self.stream, self.clock, self.repeats = method, stream, clock, repeats
        self.steps, self.bare, self.projections, self.start = [], [], [], None
        self.last = stream.plan.num_rounds - 1

    def on_train_epoch_end(self, trainer, pl_module):
        """Before the last round, set the number of body epochs, so that this round has enough steps to time."""
        if trainer.current_epoch + 1 == self.last:
            # Each epoch has one step. The first step is a warm-up. The time of the last step is left out, because all
            # parameters are unfrozen after it.
            self.method.body_epochs = self.repeats + 2

    def projected(self, *args):
        """Call `project`, store the time of the call, and return the result."""
        start = self.clock()
        result = self.project(*args)
        self.projections.append(self.clock() - start)
        return result

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """In the body epochs of the last round, store the time of a step, run the bare loop, and store its time."""
        step = None if self.start is None else self.clock() - self.start
        if trainer.current_epoch < self.last or trainer.strategy.current_round.local_epoch < self.method.head_epochs:
            return
        if step is not None:
            self.steps.append(step)
        start = self.clock()
        gradients(pl_module.model, [batch, *past(self.method.client.method_state)], self.stream)
        if step is not None:
            self.bare.append(self.clock() - start)
        self.start = self.clock()


def past(memory):
    """Return a pair (stored samples, labels) for each past task."""
    rows = [memory["task"] == task for task in range(TASKS)]
    return [(memory["x"][chosen], memory["y"][chosen]) for chosen in rows]


def gradients(model, tasks, stream):
    """Compute the gradients of the body for the loss on each task's samples, over the classes of the task."""
    body = list(model.body.parameters())
    for x, y in tasks:
        block = next(block for block in stream.blocks if int(y[0]) in block)
        loss = F.cross_entropy(model(x)[:, list(block)], torch.searchsorted(torch.tensor(block), y))
        torch.autograd.grad(loss, body)


def make_stream(tasks):
    """Return a stream with one client, two classes per task, and one round per task."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(tasks * BATCH) % (2 * tasks)
    x = torch.randn(len(y), 3, 32, 32, generator=generator)
    stream = FederatedStream.from_arrays(
        x,
        y,
        scenario=FedViTScenario(tasks, 1, [2, 2], [1.0, 1.0], rounds_per_task=1),
        split=Split(test=0.0),
        batch_size=BATCH,
        seed=0,
    )
    stream.setup("fit")
    client = stream.plan.clients[0]
    stream.blocks = [stream.client_round(client, round_idx).task_classes for round_idx in range(tasks)]
    return stream


def fit(stream, method, quick, *callbacks):
    """Train the client on all tasks of the stream."""
    torch.manual_seed(0)
    classes = stream.num_classes
    model, reductions = ViT(classes, **(TINY if quick else {})), {}
    if isinstance(method, FedViT):
        reductions = {"model.head.*": "local"}
    elif isinstance(method, FedWEIT):
        model, reductions = FedWEITNet(model, num_tasks=TASKS), DECOMPOSED
    task = Classifier(
        model, classes, task_incremental=True,
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4, weight_decay=0.05),
    )  # fmt: skip
    trainer = L.Trainer(
        strategy=FederatedStrategy(reductions=reductions, seed=0), max_epochs=stream.plan.num_rounds, accelerator="cpu",
        callbacks=[method, *callbacks], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, datamodule=stream)


def compare(options):
    """Print the ratio of a step's time to the bare gradients' time, and the projection's share of a step's time."""
    clock = time.process_time if options.cpu else time.perf_counter
    stream = make_stream(TASKS + 1)
    method = FedViT(rho=KEPT, k=TASKS, head_epochs=1, body_epochs=1, integration_epochs=0)
    times = Times(method, stream, clock, options.repeats)
    times.project, fedvit.project = fedvit.project, times.projected
    try:
        fit(stream, method, options.quick, times)
    finally:
        fedvit.project = times.project
    projections = times.projections[-len(times.steps) :]
    pairs = list(zip(times.steps, times.bare, projections, strict=True))[: options.repeats]
    ratios, shares = [a / b for a, b, _ in pairs], [c / a for a, _, c in pairs]
    step, bare, project = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"step with {TASKS} past tasks {step:.0f} ms, its {TASKS + 1} gradients alone {bare:.0f} ms, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); target: at most 1.15"
    )
    print(
        f"projection {project:.1f} ms, share of a step {100 * statistics.median(shares):.1f} % "
        f"({100 * min(shares):.1f} to {100 * max(shares):.1f} %); target: at most 10 %",
        flush=True,
    )


class Bytes(Callback):
    """A callback that measures the bytes of the client state (method state and local parameters) after each task."""

    def __init__(self):
        self.counted = []

    def on_train_epoch_end(self, trainer, pl_module):
        """Measure the client state. Each task has one round, so this hook is called once per task."""
        state = trainer.strategy.server.client_store[trainer.datamodule.plan.clients[0]]
        values = [value for memory in state.values() for value in memory.values()]
        self.counted.append(sum(value.numel() * value.element_size() for value in values))


def draw(options):
    """Print and draw the size of each method's client state by the number of tasks."""
    # Train as little as possible, because the size of the client state does not depend on the training.
    cheap = {"k": 1, "select_every": 1000, "head_epochs": 1, "body_epochs": 1, "integration_epochs": 0}
    methods = [FedViT(rho=KEPT, **cheap), FedKNOW(rho=0.1, tune_epochs=0, **cheap), FedWEIT(), EWC()]
    points = []
    for method in methods:
        counter, name = Bytes(), type(method).__name__
        fit(make_stream(TASKS), method, options.quick, counter)
        mib = [count / 2**20 for count in counter.counted]
        print(f"{name:8} client state in MiB after each task: {', '.join(f'{value:.2f}' for value in mib)}", flush=True)
        points += [{"line": name, "round": task, "value": value} for task, value in enumerate(mib, start=1)]
    x = charts.round_axis(TASKS, "number of tasks (FedViT stores ten 32 x 32 images per task)")
    names = [type(method).__name__ for method in methods]
    layers = charts.small_multiples(
        charts.get_chart("rows").encode(x=x), names, "client state, MiB", alt.Scale(type="log")
    )
    options.out.mkdir(parents=True, exist_ok=True)
    chart = alt.layer(*layers[1:]).properties(width=420, height=280)
    charts.write_png(options.out / "memory_with_tasks.png", charts.spec(chart, rows=points))


def main():
    """Run the measurements that the options select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--cpu", action="store_true", help="measure processor time instead of wall time")
    parser.add_argument("--quick", action="store_true", help="use a tiny ViT to test the script")
    parser.add_argument("--out", type=Path, help="also write memory_with_tasks.png to this folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.repeats} repeats. The engines alternate.")
    compare(options)
    if options.out is not None:
        draw(options)


if __name__ == "__main__":
    main()
