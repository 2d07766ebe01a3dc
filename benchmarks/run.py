"""All workloads by all engines, in turns: seconds a round, processor seconds, memory and start-up.

    python benchmarks/run.py                          # everything: JSON, table and plots in runs/benchmarks
    python benchmarks/run.py --workloads har --engines ours loop --repeats 2
    python benchmarks/run.py --report                 # the table and the plots anew, of what has been measured
    python benchmarks/run.py --report --write         # and the tables of benchmarks/README.md and docs/scale.md

Every measurement is a process of its own. pfl and Flower are installed in environments of their own below `--out`,
which see this one's packages, torch among them. Nothing else should run on the machine.
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

CURVED = ["loop", "ours", "ours-two-ranks"]  # engines of the curves


def main():
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), help="default: all; of curves ours and the loop")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU when there is one")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing about speed, to try it out")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--report", action="store_true", help="measure nothing: report what lies below --out")
    parser.add_argument("--write", action="store_true", help="fill in the tables of the documents")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    machine_info = machine(options.device)
    for workload in [] if options.report else options.workloads:
        engines = options.engines or (CURVED if workload.startswith(CURVES) else list(ENGINES))
        pythons = {engine: python_of(ENGINES[engine], options.out) for engine in engines}
        results = {engine: [] for engine in engines}
        for _ in range(options.repeats):  # A B A B
            for engine, python in pythons.items():
                if results[engine] and "error" in results[engine][-1]:
                    continue  # it would fail again
                start = time.monotonic()
                measurement = measured(workload, engine, python, machine_info["device"], options.quick)
                results[engine].append(measurement)
                summary = measurement.get("error") or f"{1000 * measurement['round']:.1f} ms a round"
                print(f"{workload:14} {engine:16} {summary} ({time.monotonic() - start:.0f} s)", flush=True)
        content = {"workload": workload, "quick": options.quick, "machine": machine_info, "engines": results}
        (options.out / f"suite-{workload}.json").write_text(json.dumps(content, indent=1) + "\n")
    report.write(options.out, documents=options.write)


if __name__ == "__main__":
    main()
