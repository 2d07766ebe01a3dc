"""The machine that a run is on, for its results."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


def machine() -> str:
    """The machine in a line: processor, cores and threads, or the GPU."""
    info, gpu = Path("/proc/cpuinfo"), f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    named = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    processor, threads = named[1] if named else platform.machine(), torch.get_num_threads()
    return f"{processor}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}{gpu}"
