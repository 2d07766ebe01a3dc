"""Measurements: run an engine in a separate process, and return its time and memory."""

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
# For each engine, its module in `suite.engines`. `loop` must be first, because all states are compared with its state.
ENGINES = {
    "loop": "loop",
    "ours": "ours",
    "ours-two-ranks": "ours_ranks",
    "loop-two": "processes",
    "pfl": "pfl_research",
    "flower": "flower",
}
# Maximum duration of a measurement, in seconds.
LIMIT = 3600
# Maximum difference from the loop's state, relative to the largest value of a tensor. It is above the rounding error,
# because training amplifies rounding errors.
ALIKE = 5e-3
# For each workload, the final state of the hand-written loop.
STATES = {}


def name_of(engine):
    """Return the name of an engine in tables."""
    return import_module(f"suite.engines.{ENGINES[engine]}").NAME


def machine(device=None):
    """Return a dict of properties that affect the measured values: device, hardware, load and package versions."""
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
    """Run one measurement, and return its values by name, or ``{"error": reason}`` if the measurement fails.

    Args:
        workload: Name of the workload.
        engine: Name of the engine.
        python: Path of the Python that runs the engine. If there is none, a RuntimeError with the reason.
        device: ``"cpu"`` or ``"cuda"``.
        quick: Whether to use a small size, for tests only. Times of small sizes cannot be compared.
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
        result = summarize_marks(lines, rounds)
        workload_object = workloads.make(workload, quick)
        result["memory"] = _most(lines, memory_samples) - workload_object.nbytes / 2**20
        if workload_object.drawn is None:
            learnt = load_file(state)
            result["differs"] = difference(STATES[workload], learnt) if workload in STATES else None
            if (result["differs"] or 0) > ALIKE:
                return {"error": f"wrong result: the state differs from the loop's state by {result['differs']:.0e}"}
            if engine == "loop":
                STATES[workload] = learnt
        return result


def _most(lines, memory_samples):
    """Return the peak memory in MiB after the data were created. Values from before this time are ignored."""
    data_time = next(line["time"] for line in lines if line["name"] == "data")
    memory_by_time = [*((line["time"], line["most"]) for line in lines), *memory_samples]
    return max(mib for when, mib in memory_by_time if when > data_time)


def summarize_marks(lines, rounds):
    """Return the times that the marks contain, by name.

    Args:
        lines: The marks.
        rounds: Number of rounds, including the warm-up.

    Returns:
        Seconds (``round``) and processor seconds (``cpu``) per round without the warm-up, and the time from the
        creation of the workload's data to the start of training (``start``). If the engine marks the set-up of its
        data, three more values: the time of the set-up (``setup``), which is part of ``start``, the time from the end
        of the set-up to the first round (``first``), and the growth of the peak memory in MiB since the start of the
        set-up (``grown``).
    """
    mark_by_name = {line["name"]: line for line in lines}
    timed = rounds - 1
    result = {
        "round": (mark_by_name["last"]["time"] - mark_by_name["first"]["time"]) / timed,
        "cpu": (mark_by_name["last"]["cpu"] - mark_by_name["first"]["cpu"]) / timed,
        # The start-up time includes the imports of the engine.
        "start": mark_by_name["begin"]["time"] - mark_by_name["data"]["time"],
    }
    if "planned" in mark_by_name:
        result["setup"] = mark_by_name["planned"]["time"] - mark_by_name["planning"]["time"]
        result["first"] = mark_by_name["begin"]["time"] - mark_by_name["planned"]["time"]
        result["grown"] = mark_by_name["last"]["most"] - mark_by_name["planning"]["most"]
    return result


def difference(expected, actual):
    """Return the largest difference between two states, relative to the largest value of each expected tensor."""
    if expected.keys() != actual.keys():
        raise ValueError(f"Expected a state with the entries {sorted(expected)}, but got {sorted(actual)}.")
    return max(
        float((actual[n] - value).abs().max() / value.abs().max().clamp(min=1e-12)) for n, value in expected.items()
    )


def _watched(command, workload, quick, errors):
    """Run a command, and measure the memory of the command's process and all descendants.

    Returns:
        The reason of a failure, or None if the command succeeded. The memory samples, as pairs of time and MiB.
    """
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
            # A memory sample of large processes takes long and uses a core, so the pause grows with its duration.
            pause = max(0.5, 50 * (time.monotonic() - start))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"no result after {LIMIT} s", []
    finally:
        end_event.set()
        watcher.join()
        with contextlib.suppress(ProcessLookupError):
            # End all processes of the command that are still running.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        lines = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit {code}"), []
    return None, memory_samples
