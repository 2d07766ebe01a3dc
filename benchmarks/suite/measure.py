"""One measurement, run in a separate process.

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
    """Kill this process group when the process that started the measurement (``parent``) has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main(name, engine, rounds, marks, state, device, quick=""):
    """Create the data of the workload ``name``, run the engine, and write marks and the server's last state."""
    torch.set_num_threads(1)
    # Processes of further ranks run this function, too. They inherit `SUITE_ROOT` from the first process.
    root = int(os.environ.setdefault("SUITE_ROOT", str(os.getpid())))
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
