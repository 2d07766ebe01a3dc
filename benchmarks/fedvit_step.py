"""A step of FedViT against the gradients that it cannot do without, A B A B in one process; what methods keep per task.

    OMP_NUM_THREADS=1 python benchmarks/fedvit_step.py

A step of the body of the 6-layer ViT (2.7 M parameters) with ten past tasks takes eleven gradients: of the batch, and
of what is kept of each task. In turns with the steps of a real `Trainer.fit` (Lightning's loop, the federation's and
the method's hooks, AdamW), a bare loop takes these gradients alone, of the same samples at the same parameters. Of each
past task ten images are kept, as of 2 to 5 classes of which a client has 25 to 50 images each; a batch has 32. Images
are random: time does not depend on values. The share of the projection is that of `project` in the steps.

`--out` also trains a client on ten tasks with each method, and draws the bytes that are kept for it after each
task as `memory_with_tasks.png`. `--cpu` counts processor time, for a machine on which something else runs, and
`--quick` tries the script out on a tiny ViT.
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

TASKS, BATCH = 10, 32  # past tasks, images of a batch and of a task
KEPT = 0.3  # of the 32 images of a task: ten
DECOMPOSED = {"model.tasks.*": "local", "model.net.head.*": "local", "model.net.body.*weight": "sparse_mean"}
TINY = {"width": 24, "depth": 2, "num_heads": 2, "patch_size": 16}


class Times(Callback):
    """Takes the time of the body's steps in the last round, the bare loop's after each, and the projection's."""

    def __init__(self, method, stream, clock, repeats):
        self.method, self.stream, self.clock, self.repeats = method, stream, clock, repeats
        self.steps, self.bare, self.projections, self.start = [], [], [], None
        self.last = stream.plan.num_rounds - 1

    def on_train_epoch_end(self, trainer, pl_module):
        """Before the last round: as many steps as are to be timed."""
        if trainer.current_epoch + 1 == self.last:
            self.method.body_epochs = self.repeats + 2  # the first step warms up, and after the last all is unfrozen

    def projected(self, *args):
        """`project`, timed."""
        start = self.clock()
        result = self.project(*args)
        self.projections.append(self.clock() - start)
        return result

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """After a step of the body: the bare loop's turn."""
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
    """What is kept of each past task."""
    rows = [memory["task"] == task for task in range(TASKS)]
    return [(memory["x"][chosen], memory["y"][chosen]) for chosen in rows]


def gradients(model, tasks, stream):
    """The body's gradient of the loss on each task's samples, among the task's classes."""
    body = list(model.body.parameters())
    for x, y in tasks:
        block = next(block for block in stream.blocks if int(y[0]) in block)
        loss = F.cross_entropy(model(x)[:, list(block)], torch.searchsorted(torch.tensor(block), y))
        torch.autograd.grad(loss, body)


def make_stream(tasks):
    """One client, whose every task has two classes, in one round."""
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
    """Train the client on all its tasks."""
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
    """Print the ratio of the steps to the bare gradients, and the projection's share."""
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
        f"step with {TASKS} past tasks {step:.0f} ms, its {TASKS + 1} gradients {bare:.0f} ms, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); aim: at most 1.15"
    )
    print(
        f"projection {project:.1f} ms, share of a step {100 * statistics.median(shares):.1f} % "
        f"({100 * min(shares):.1f} to {100 * max(shares):.1f} %); aim: at most 10 %",
        flush=True,
    )


class Bytes(Callback):
    """Counts what is kept for the client after each task: its method's memory, and its part of the model."""

    def __init__(self):
        self.counted = []

    def on_train_epoch_end(self, trainer, pl_module):
        """After a task's only round: count."""
        state = trainer.strategy.server.client_store[trainer.datamodule.plan.clients[0]]
        values = [value for memory in state.values() for value in memory.values()]
        self.counted.append(sum(value.numel() * value.element_size() for value in values))


def draw(options):
    """Print and draw what the methods keep with the number of tasks."""
    # Little training: what is kept does not depend on it.
    cheap = {"k": 1, "select_every": 1000, "head_epochs": 1, "body_epochs": 1, "integration_epochs": 0}
    methods = [FedViT(rho=KEPT, **cheap), FedKNOW(rho=0.1, tune_epochs=0, **cheap), FedWEIT(), EWC()]
    points = []
    for method in methods:
        counter, name = Bytes(), type(method).__name__
        fit(make_stream(TASKS), method, options.quick, counter)
        mib = [count / 2**20 for count in counter.counted]
        print(f"{name:8} MiB kept after each task: {', '.join(f'{value:.2f}' for value in mib)}", flush=True)
        points += [{"line": name, "round": task, "value": value} for task, value in enumerate(mib, start=1)]
    x = charts.round_axis(TASKS, "tasks (FedViT: ten images of each, 32 x 32)")
    names = [type(method).__name__ for method in methods]
    layers = charts.small_multiples(
        charts.get_chart("rows").encode(x=x), names, "MiB kept for a client", alt.Scale(type="log")
    )
    options.out.mkdir(parents=True, exist_ok=True)
    chart = alt.layer(*layers[1:]).properties(width=420, height=280)
    charts.write_png(options.out / "memory_with_tasks.png", charts.spec(chart, rows=points))


def main():
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of the clock on the wall")
    parser.add_argument("--quick", action="store_true", help="a tiny ViT, to try the script out")
    parser.add_argument("--out", type=Path, help="folder for memory_with_tasks.png; left out: times alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.repeats} repeats, A B A B")
    compare(options)
    if options.out is not None:
        draw(options)


if __name__ == "__main__":
    main()
