"""Wall time of a fit that writes a run folder and a checkpoint every round, compared with another version.

    python benchmarks/durable_files.py PATH_OF_THE_OTHER_VERSION

The versions alternate. The script prints the ratio of the two wall times for each pair, and the median of these
ratios. Client state is stored on disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seconds(version: Path, folder: Path, rounds: int) -> float:
    """Return the wall time in seconds of one fit with the package in the folder ``version``."""
    words = ["fit", "quickstart", "--out", str(folder), "--trainer.enable_progress_bar", "false"]
    words += ["--trainer.strategy.client_store", "disk", "--trainer.max_epochs", str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(version), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lightning_fcl.cli.main", *words], env=environment, check=True, stdout=-3)
    return time.perf_counter() - start


def main() -> None:
    """Print this version's wall time divided by the other version's wall time, for each pair, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="set the root of a checkout of the other version")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    ratios = []
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    # The temporary folder of the system can be in memory, which would hide the time of the disk. Therefore the script
    # uses `runs`.
    with tempfile.TemporaryDirectory(dir=runs) as scratch:
        for pair in range(options.pairs):
            seconds_by_version = {}
            for version in (ROOT, options.other)[:: 1 if pair % 2 else -1]:
                name = f"{pair}-{'this' if version == ROOT else 'other'}"
                seconds_by_version[version] = seconds(version.resolve(), Path(scratch, name), options.rounds)
            ratios.append(seconds_by_version[ROOT] / seconds_by_version[options.other])
            print(f"pair {pair}: {ratios[-1]:.3f}", flush=True)
    print(f"median: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
