"""One measurement in a process of its own.

python -m suite.measure WORKLOAD ENGINE ROUNDS MARKS STATE DEVICE [quick]
"""

import os
import sys
from importlib import import_module

import torch

from suite import workloads
from suite.marks import Marks, forget_peak


def main(name, engine, rounds, marks, state, device, quick=""):
    """Make the data, then let the engine train."""
    torch.set_num_threads(1)
    root = int(os.environ.setdefault("SUITE_ROOT", str(os.getpid())))  # ranks begin here as well
    marks = Marks(marks, root, int(rounds))
    if root == os.getpid():
        marks.add("loading")
    workload = workloads.make(name, bool(quick))
    if root == os.getpid():
        marks.add("data")
        forget_peak()
    module = import_module(f"suite.engines.{engine}")
    if reason := module.refuses(workload):
        raise SystemExit(f"refused: {reason}")
    module.run(workload, int(rounds), marks, state, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
