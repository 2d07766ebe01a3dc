"""One measurement in a process of its own.

python -m suite.measure WORKLOAD ENGINE ROUNDS MARKS STATE DEVICE [quick]
"""

import os
import signal
import sys
import threading
import time
from importlib import import_module

import torch

from suite import workloads
from suite.marks import Marks, forget_peak


def end_with(parent):
    """End with all that was started here when the process that measures is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main(name, engine, rounds, marks, state, device, quick=""):
    """Make the data, then let the engine train."""
    torch.set_num_threads(1)
    root = int(os.environ.setdefault("SUITE_ROOT", str(os.getpid())))  # ranks begin here as well
    marks = Marks(marks, root, int(rounds))
    if root == os.getpid():
        threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
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
