"""Finished runs that lie beside a paper's recipes: they are taken in place of running them again.

``recipes/PAPER/SCALE/`` (``recipes/PAPER/`` for the paper's own scale) has them in the folders that ``reproduce`` gives
them below ``--out``, each with its ``results.json`` and its fingerprint: the report and its plots are drawn from those.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fcl.cli.jobs import Job, begin, finished
from lightning_fcl.evaluation.results import read_results, write_results
from lightning_fcl.evaluation.run_folder import write_files


def take(jobs: Sequence[Job], out: Path, kept: Path) -> None:
    """Bring kept runs of the same fingerprint to where those of jobs that are not finished would be."""
    taken = 0
    for job in jobs:
        source = kept / job.out.relative_to(out)
        if finished(job) or not (source / "results.json").is_file():
            continue
        try:
            if not job.wrote(source):
                raise ValueError(
                    f"Expected {source} to be of this recipe, seed and version but its fingerprint is another."
                )
            results = read_results(source)
            if job.needs(results):
                raise ValueError(
                    f"Expected {source} to be of all tasks that are asked for but it is of {results['tasks']}."
                )
            begin(job)
            write_results(job.out, results)
            write_files(job.out)
            taken += 1
        except ValueError as error:
            print(f"{job.label} is run anew: {error}", file=sys.stderr)
    if taken:
        print(f"{taken} of {len(jobs)} runs are taken from {kept}.", file=sys.stderr)


def keep(job: Job, out: Path, kept: Path, command: str) -> Path:
    """Put a finished run below a paper's folder, in two small files."""
    target = kept / job.out.relative_to(out)
    target.mkdir(parents=True, exist_ok=True)
    write_results(target, read_results(job.out) | {"command": command}, indent=None)
    job.sign(target)
    return target
