"""Measurements of all workloads with all engines: time per round, processor time, memory and start-up time.

    python benchmarks/run.py                          # measure everything; JSON, table and plots in runs/benchmarks
    python benchmarks/run.py --workloads har --engines ours loop --repeats 2
    python benchmarks/run.py --report                 # write only the table and the plots of existing measurements
    python benchmarks/run.py --report --write         # also update the tables of benchmarks/README.md and docs/scale.md

Each measurement runs in a separate process. pfl and Flower are installed in separate environments in `--out`. These
environments also use the packages of the current environment, such as torch. Run nothing else on the machine.
"""

import argparse
import json
import os
import time
from pathlib import Path

from suite import report
from suite.environments import python_of
from suite.measuring import ENGINES, machine, measured
from suite.workloads import CURVES, WORKLOADS

# Default engines of the workloads that are points of a curve.
CURVED = ["loop", "ours", "ours-two-ranks"]


def main():
    """Measure the selected workloads with the selected engines, and report the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument(
        "--engines",
        nargs="*",
        choices=list(ENGINES),
        help="select engines (default: all; for curves: loop, ours and ours-two-ranks)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="set the device (default: a GPU if there is one)")
    parser.add_argument("--quick", action="store_true", help="use small sizes to test the script")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--report", action="store_true", help="report existing measurements, without measuring")
    parser.add_argument("--write", action="store_true", help="update the tables of the documentation")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    machine_info = machine(options.device)
    for workload in [] if options.report else options.workloads:
        engines = options.engines or (CURVED if workload.startswith(CURVES) else list(ENGINES))
        pythons = {engine: python_of(ENGINES[engine], options.out) for engine in engines}
        results = {engine: [] for engine in engines}
        # Engines alternate, so that all are measured under the same load of the machine.
        for _ in range(options.repeats):
            for engine, python in pythons.items():
                # Skip an engine that has failed in an earlier repeat, because the engine would fail again.
                if results[engine] and "error" in results[engine][-1]:
                    continue
                start = time.monotonic()
                measurement = measured(workload, engine, python, machine_info["device"], options.quick)
                results[engine].append(measurement)
                summary = measurement.get("error") or f"{1000 * measurement['round']:.1f} ms per round"
                print(
                    f"{workload:14} {engine:16} {summary}, measurement took {time.monotonic() - start:.0f} s",
                    flush=True,
                )
        content = {"workload": workload, "quick": options.quick, "machine": machine_info, "engines": results}
        (options.out / f"suite-{workload}.json").write_text(json.dumps(content, indent=1) + "\n")
    report.write(options.out, documents=options.write)


if __name__ == "__main__":
    main()
