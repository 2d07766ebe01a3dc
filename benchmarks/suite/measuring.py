"""Runs one measurement and tells what it took; what the machine is."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import load_file

from suite import workloads
from suite.marks import memory

FOLDER = Path(__file__).parent.parent
# name -> module of `suite.engines`
ENGINES = {
    "loop": "loop",  # first: the others' states are compared with its
    "ours": "ours",
    "ours-two-ranks": "ours_ranks",
    "loop-two": "processes",
    "pfl": "pfl_research",
    "flower": "flower",
}
LIMIT = 3600  # seconds that a measurement may take
ALIKE = 5e-3  # how much states may differ, by the largest number of an entry: rounding, which training makes larger
STATES = {}  # what the loop has learnt, for each workload


def name_of(engine):
    """What tables call it."""
    return import_module(f"suite.engines.{ENGINES[engine]}").NAME


def machine(device=None):
    """What the numbers depend on."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "processor": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "lightning", "numpy")},
    }


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def measured(workload, engine, python, device="cpu", quick=False):
    """One measurement: seconds and MiB; or ``{"error": ...}``, what the engine said.

    Args:
        workload: Its name.
        engine: Its name.
        python: The Python that runs it, or why there is none.
        device: ``"cpu"`` or ``"cuda"``.
        quick: Whether at a size that says nothing about speed.
    """
    if isinstance(python, RuntimeError):
        return {"error": str(python)}
    rounds = 1 + workloads.rounds_of(workload, quick)
    with tempfile.TemporaryDirectory() as folder:
        marks, state, errors = (Path(folder) / name for name in ("marks", "state", "errors"))
        command = [python, "-m", "suite.measure", workload, ENGINES[engine], rounds, marks, state, device]
        error, memory_samples = _watched([*map(str, command), *(["quick"] if quick else [])], workload, quick, errors)
        if error:
            return {"error": error}
        lines = [json.loads(line) for line in marks.read_text().splitlines()]
        result = told(lines, rounds)
        workload_object = workloads.make(workload, quick)
        result["memory"] = _most(lines, memory_samples) - workload_object.nbytes / 2**20
        if workload_object.drawn is None:
            learnt = load_file(state)
            result["differs"] = difference(STATES[workload], learnt) if workload in STATES else None
            if (result["differs"] or 0) > ALIKE:
                return {"error": f"not the same work: its state differs from the loop's by {result['differs']:.0e}"}
            if engine == "loop":
                STATES[workload] = learnt
        return result


def _most(lines, memory_samples):
    """The most MiB, once the data were there: what making them took is forgotten."""
    data_time = next(line["time"] for line in lines if line["name"] == "data")
    memory_by_time = [*((line["time"], line["most"]) for line in lines), *memory_samples]
    return max(mib for when, mib in memory_by_time if when > data_time)


def told(lines, rounds):
    """What marks tell: seconds a round, processor seconds a round, and seconds to start, data left out."""
    mark_by_name = {line["name"]: line for line in lines}
    timed = rounds - 1
    result = {
        "round": (mark_by_name["last"]["time"] - mark_by_name["first"]["time"]) / timed,
        "cpu": (mark_by_name["last"]["cpu"] - mark_by_name["first"]["cpu"]) / timed,
        "start": mark_by_name["begin"]["time"] - mark_by_name["data"]["time"],  # imports among it
    }
    if "planned" in mark_by_name:
        result["setup"] = mark_by_name["planned"]["time"] - mark_by_name["planning"]["time"]
        result["first"] = mark_by_name["begin"]["time"] - mark_by_name["planned"]["time"]
        result["grown"] = mark_by_name["last"]["most"] - mark_by_name["planning"]["most"]
    return result


def difference(expected, actual):
    """The largest difference of two states, entry by entry, by the largest number of the entry."""
    if expected.keys() != actual.keys():
        raise ValueError(f"Expected a state of {sorted(expected)} but got {sorted(actual)}.")
    return max(
        float((actual[n] - value).abs().max() / value.abs().max().clamp(min=1e-12)) for n, value in expected.items()
    )


def _watched(command, workload, quick, errors):
    """Run a command; what it said if it failed, and the MiB that it and its children took together, by time."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "SUITE_WORKLOAD": workload,
        "SUITE_QUICK": "1" if quick else "",
    }
    with errors.open("w") as output_file:
        process = subprocess.Popen(
            command, env=environment, stdout=output_file, stderr=subprocess.STDOUT, start_new_session=True
        )
    memory_samples, end_event = [], threading.Event()

    def watch():
        pause = 0.5
        while not end_event.wait(pause):
            start = time.monotonic()
            memory_samples.append((start, memory(process.pid)))
            pause = max(0.5, 50 * (time.monotonic() - start))  # of large processes looking takes long, and a core

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT} s", []
    finally:
        end_event.set()
        watcher.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # of those that it has left behind
        process.wait()
    if code:
        lines = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit {code}"), []
    return None, memory_samples
