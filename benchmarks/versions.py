"""Processor time of a round with this version of the library, divided by the processor time with another version.

    git worktree add ../other cc30327
    python benchmarks/versions.py ../other

The script starts two processes, which import one version each. For every timed case, each process first runs the case
once, and this run is not measured. Then the processes alternate, and the ratio is computed for each pair of runs. The
cases are:

- the cases of `round_overhead.py` with digits,
- the cases of `any_module.py`,
- steps of a Trainer without a federation,
- FedAvg, and methods that compute a result when an experience ends. 20 clients have digits in 5 experiences of 4
  rounds. All clients, or 4 of 20 clients, train in each round. The script also compares the sizes of client state and
  uploads.

Run nothing else on the machine.
"""

import argparse
import functools
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings

HERE = pathlib.Path(__file__).resolve().parent

METHODS = {
    "FedAvg": [],
    "EWC": [("EWC", {"strength": 100.0})],
    "Replay": [("Replay", {"memory_size": 200})],
    "CCVR": [("CCVR", {})],
}


def train(method, participation):
    """Train a method on digits, and return the time of a round, the size of the client state, and the upload size.

    Returns:
        Processor seconds per round, bytes of the client state (mean over the clients, largest value over the rounds),
        and bytes that all clients upload in the fit.
    """
    import lightning.pytorch as L
    import torch
    from round_overhead import Clock, trainer_of

    from lightning_fcl import Classifier, FederatedStrategy, FederatedStream, callbacks
    from lightning_fcl.data.partition import Dirichlet
    from lightning_fcl.data.scenarios import ClassIncremental
    from lightning_fcl.models import MLP

    state_bytes, upload_bytes = [], []

    class Bytes(L.Callback):
        """A callback that stores the bytes of client state and uploads after each round."""

        def on_train_epoch_end(self, trainer, pl_module):
            server = trainer.strategy.server
            clients = trainer.datamodule.plan.clients
            state_bytes.append(sum(server.client_store.nbytes(client) for client in clients) / len(clients))
            upload_bytes.append(sum(server.record.upload_bytes.values()))

    stream = FederatedStream("digits", ClassIncremental(5, rounds_per_experience=4), Dirichlet(20, 1.0), batch_size=16)
    torch.manual_seed(0)
    task = Classifier(MLP([64, 32, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.05))
    clock = Clock(time.process_time)
    trainer = trainer_of(clock, 19, FederatedStrategy(participation=participation, seed=0))
    trainer.callbacks += [getattr(callbacks, name)(**options) for name, options in METHODS[method]] + [Bytes()]
    trainer.fit(task, datamodule=stream)
    return (clock.end - clock.start) / 19, max(state_bytes), sum(upload_bytes)


def train_plain(method, epochs):
    """Train a method in a Trainer without a federation, and return the processor seconds of a step."""
    import lightning.pytorch as L
    import torch
    from round_overhead import Clock
    from sklearn.datasets import load_digits

    from lightning_fcl import Classifier, callbacks
    from lightning_fcl.models import MLP

    x, y = load_digits(return_X_y=True)
    samples = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    loader = torch.utils.data.DataLoader(samples, batch_size=16)
    torch.manual_seed(0)
    task = Classifier(MLP([64, 32, 10]), 10, lambda params: torch.optim.SGD(params, lr=0.05))
    clock = Clock(time.process_time)
    methods = [getattr(callbacks, name)(**options) for name, options in METHODS[method]]
    trainer = L.Trainer(
        max_epochs=epochs + 1, callbacks=[clock, *methods], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, loader)
    return (clock.end - clock.start) / (epochs * len(loader))


def cases(quick):
    """Return a dict that maps the name of each case to a function, which runs the case and returns a measurement."""
    import any_module
    import round_overhead

    sizes = {
        "100 x 15 digits, batches of 4": ((100, 4), 60),
        "100 x 15, one batch": ((100, 15), 200),
        "100 x 15, 512 units": ((100, 15, 512), 60),
        "100 x 15, 2,048 units": ((100, 15, 2048), 20),
        "1,000 x 15, one batch": ((1000, 15), 40),
    }
    functions = {}
    for name, (arguments, rounds) in sizes.items():
        case, rounds = round_overhead.digits_case(*arguments), 2 if quick else rounds
        functions[f"round_overhead: {name}"] = lambda case=case, rounds=rounds: round_overhead.through_trainer(
            case, rounds, time.process_time
        )[0]
    for name in any_module.CASES:
        functions[f"any_module: {name}"] = lambda name=name: any_module.through_trainer(
            name, 2 if quick else 60, timer=time.process_time
        )[0]
    functions["any_module: one client at a time"] = lambda: any_module.through_trainer(
        "plain", 2 if quick else 10, 2, 1, time.process_time
    )[0]
    for method in ("FedAvg", "EWC", "Replay"):
        functions[f"plain Trainer, a step: {method}"] = functools.partial(train_plain, method, 1 if quick else 5)
    fits = 1 if quick else 3
    for participation in (1.0, 0.2):
        for method in METHODS:
            one_fit = functools.partial(train, method, participation)
            case = f"{method}, participation {participation}"
            functions[case] = lambda one_fit=one_fit: statistics.mean(one_fit()[0] for _ in range(fits))
            functions[f"bytes: {case}"] = lambda one_fit=one_fit: one_fit()[1:]
    return functions


def serve(quick):
    """Read the names of cases from the standard input. Run each case, and print its result."""
    import torch

    import lightning_fcl

    torch.set_num_threads(1)
    print(pathlib.Path(lightning_fcl.__file__).parent.parent, flush=True)
    run = cases(quick)
    warnings.simplefilter("ignore")
    # `cases` imports Lightning, which sets its own log level. So the level is set after this import.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("|".join(run), flush=True)
    for line in sys.stdin:
        print("found", json.dumps(run[line.strip()]()), flush=True)


class Version:
    """A process that imports the library from a folder and runs cases."""

    def __init__(self, folder, quick):
        command = [sys.executable, __file__, str(folder), "--serve", *["--quick"] * quick]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        imported = self.process.stdout.readline().strip()
        assert imported == str(folder), f"the process imported {imported} instead of {folder}"
        self.cases = self.process.stdout.readline().strip().split("|")

    def close(self):
        """Close the standard input of the process, and wait until the process ends."""
        self.process.stdin.close()
        self.process.wait()

    def run(self, case):
        """Run a case in the process, and return its result."""
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("found "):
            assert line, f"the process ended during the case {case}"
        return json.loads(line.removeprefix("found "))


def main():
    """Measure all cases, or the cases whose names contain the text of `--only`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, help="set the folder of the other version")
    parser.add_argument("--only", default="", help="run the cases whose names contain this text")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="run few rounds to test the script")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.quick)
        return
    this_version, other_version = Version(HERE.parent, options.quick), Version(options.other.resolve(), options.quick)
    for case in (case for case in this_version.cases if options.only in case):
        if case.startswith("bytes: "):
            (state, uploads), (other_state, other_uploads) = this_version.run(case), other_version.run(case)
            print(
                f"{case:46} client state {state / 1e3:.1f} kB, other {other_state / 1e3:.1f} kB; "
                f"uploads {uploads / 1e6:.3f} MB, other {other_uploads / 1e6:.3f} MB",
                flush=True,
            )
            continue
        this_version.run(case), other_version.run(case)
        pairs = [(this_version.run(case), other_version.run(case)) for _ in range(options.repeats)]
        ratios = [new / old for new, old in pairs]
        new, old = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{case:46} this {new:8.2f} ms, other {old:8.2f} ms, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    this_version.close()
    other_version.close()


if __name__ == "__main__":
    main()
