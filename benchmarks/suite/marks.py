"""When data were there, when training began, and when each round ended: lines of a file, from whatever process."""

import json
import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def processes(root):
    """A process and all that it has started, and these in turn."""
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
    """What Linux tells of a process from its state on; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def cpu_seconds(root):
    """Processor seconds of a process and all that it has started, also those that have ended."""
    process_stats = (_stat(pid) for pid in processes(root))
    return sum(sum(map(int, fields[11:15])) for fields in process_stats if fields is not None) / TICKS


def memory(root):
    """MiB that a process and all that it has started take; what they share is counted once."""
    return sum(_of(pid, "smaps_rollup", "Pss:") for pid in processes(root))


def high_water(pid):
    """The most MiB that one process has taken."""
    return _of(pid, "status", "VmHWM:")


def forget_peak():
    """Let `high_water` of this process begin with what it takes now."""
    Path("/proc/self/clear_refs").write_text("5")


def _of(pid, file, field):
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    words = text.partition(field)[2].split()
    return int(words[0]) / 1024 if words else 0.0


class Marks:
    """Writes them.

    Args:
        path: The file.
        root: The process whose processor time counts, with all that it starts.
        rounds: How many rounds there will be, the first among them, which warms up.
    """

    def __init__(self, path, root, rounds):
        self.path, self.root, self.rounds, self.done = str(path), root, rounds, 0

    def add(self, name, cpu=False):
        """A mark, now."""
        line = {"name": name, "time": time.monotonic(), "most": high_water(os.getpid())}
        line |= {"cpu": cpu_seconds(self.root)} if cpu else {}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self):
        """The first round begins."""
        self.add("begin")

    def round(self):
        """A round has ended."""
        self.done += 1
        if self.done in (1, self.rounds):
            self.add("first" if self.done == 1 else "last", cpu=True)
