"""The environment of a run, in the format of ``environment.json``: versions, machine, git commit and checksums."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from lightning_fcl import __version__
from lightning_fcl.data.checksum import data_checksum
from lightning_fcl.data.samples import data_name
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.evaluation.results import CONFIG
from lightning_fcl.io.checksums import sha256
from lightning_fcl.io.reading import read_text

_GIT_SECONDS = 10


def make_environment(stream: FederatedStream, folder: Path) -> dict[str, Any]:
    """Return the content of ``environment.json`` of a run.

    The content has no paths, host names or addresses of package indexes:

    - ``python``: Version of Python.
    - ``packages``: Version of each installed package, by name.
    - ``machine``: Processor, number of cores and threads, and GPUs, as in ``results.json``.
    - ``gpus``: Name of each GPU.
    - ``platform``: Operating system and architecture, such as ``Linux x86_64``.
    - ``git``: ``commit`` of the repository in the working directory, and ``dirty``, whether tracked files have changes
      that are not committed. None outside of a repository.
    - ``recipe_sha256``: SHA-256 of ``config.yaml``.
    - ``data``: ``name``, ``samples`` and ``sha256`` of the data. The checksum covers the samples, targets, owners,
      domains and splits. It is None for datasets whose files are unknown, see `data_checksum`.

    Args:
        stream: Stream of the run.
        folder: Folder of the run, which contains ``config.yaml``.
    """
    installed = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"]}
    # The metadata of an editable installation may contain an old version.
    packages = dict(sorted({**installed, "lightning-fcl": __version__}.items(), key=lambda item: item[0].lower()))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    samples = stream.samples
    return {
        "python": platform.python_version(),
        "packages": packages,
        "machine": describe_machine(),
        "gpus": gpus,
        "platform": f"{platform.system()} {platform.machine()}",
        "git": _find_commit(),
        "recipe_sha256": sha256(folder / CONFIG) if (folder / CONFIG).is_file() else None,
        "data": {"name": data_name(stream.data), "samples": len(samples), "sha256": data_checksum(samples)},
    }


def describe_machine() -> str:
    """Return a description of the machine in one line: processor, cores, threads and GPU."""
    info, gpu = Path("/proc/cpuinfo"), f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    name_match = re.search(r"^model name\s*: (.+)$", read_text(info), re.MULTILINE) if info.is_file() else None
    processor, threads = name_match[1] if name_match else platform.machine(), torch.get_num_threads()
    return f"{processor}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}{gpu}"


def _find_commit() -> dict[str, Any] | None:
    """Return the commit of the repository in the working directory, and whether tracked files have changed."""
    git = shutil.which("git")
    if git is None:
        return None

    def run(*words: str) -> str:
        process = subprocess.run([git, *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
        return process.stdout.strip()

    try:
        return {"commit": run("rev-parse", "HEAD"), "dirty": bool(run("status", "--porcelain", "-uno"))}
    except (subprocess.SubprocessError, OSError):
        return None
