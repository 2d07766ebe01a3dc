"""Marks: the times at which data are ready, training starts, and rounds end.

All processes of a measurement append marks to one file, one JSON line per mark. A mark also contains the peak memory of
the process. Marks at the end of rounds also contain the processor time. Both values are read from ``/proc``.
"""

import json
import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def processes(root):
    """Return the ids of a process and all its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _stat(folder.name)
            if fields is not None:
                parents[int(folder.name)] = int(fields[1])
    process_ids, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - process_ids
        process_ids |= new
    return process_ids


def _stat(pid):
    """Return the fields of ``/proc/PID/stat`` from the process state on, or None if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def cpu_seconds(root):
    """Return the processor seconds of a process and its descendants, including descendants that have ended."""
    process_stats = (_stat(pid) for pid in processes(root))
    return sum(sum(map(int, fields[11:15])) for fields in process_stats if fields is not None) / TICKS


def memory(root):
    """Return the memory of a process and its descendants in MiB. Shared memory is counted once."""
    return sum(_of(pid, "smaps_rollup", "Pss:") for pid in processes(root))


def high_water(pid):
    """Return the peak memory of one process in MiB."""
    return _of(pid, "status", "VmHWM:")


def forget_peak():
    """Reset the peak memory of this process to its current memory."""
    Path("/proc/self/clear_refs").write_text("5")


def _of(pid, file, field):
    """Return a field of a ``/proc`` file in MiB, or 0 if the file cannot be read."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    words = text.partition(field)[2].split()
    return int(words[0]) / 1024 if words else 0.0


class Marks:
    """Writer of marks.

    Args:
        path: File to which marks are appended.
        root: Id of a process. Marks contain the processor time of this process and its descendants.
        rounds: Number of rounds, including the first round, which is a warm-up.
    """

    def __init__(self, path, root, rounds):
        self.path, self.root, self.rounds, self.done = str(path), root, rounds, 0

    def add(self, name, cpu=False):
        """Write a mark with the current time and this process's peak memory, and with processor time if ``cpu``."""
        line = {"name": name, "time": time.monotonic(), "most": high_water(os.getpid())}
        line |= {"cpu": cpu_seconds(self.root)} if cpu else {}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self):
        """Mark the start of the first round."""
        self.add("begin")

    def round(self):
        """Count a finished round. Write a mark if it is the first or the last round."""
        self.done += 1
        if self.done in (1, self.rounds):
            self.add("first" if self.done == 1 else "last", cpu=True)
