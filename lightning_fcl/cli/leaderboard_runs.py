"""Finished runs of the leaderboard, stored in ``runs.json`` of the recipe folder.

An entry contains the columns of a run and the fingerprint of its recipe, but not the whole record. A later command
takes a run with the same fingerprint from this file instead of training it again, also on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning_fcl.cli.jobs import Job
from lightning_fcl.errors import DamagedFileError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_json

LeaderboardRun: TypeAlias = Mapping[str, Any]
"""The part of ``results.json`` of a run that the tables use, with the columns of the leaderboard as ``metrics``."""

RUNS = "runs.json"
_FORMAT = 1
_HINT = "Delete the file, and run `lightning-fcl leaderboard --commit-runs`."
_NAMES = {"fingerprint", "recipe", "seed", "metrics", "expected", "versions", "machine", "seconds", "record"}


def reduce_results(
    results: Mapping[str, Any], columns: Mapping[str, float], fingerprint: str, with_samples: bool
) -> LeaderboardRun:
    """Return the part of the results of a run that the tables use.

    Args:
        results: Content of ``results.json``.
        columns: Columns of the leaderboard.
        fingerprint: Fingerprint of the run, see `Job.fingerprint`.
        with_samples: Whether the result contains the correctness of the predictions on single test samples.
    """
    last_round = results["record"]["rounds"][-1]
    samples = {name: last_round[name] for name in ("correct_samples",) if with_samples and name in last_round}
    record = {"totals": [sum(results["record"]["totals"])], "rounds": [samples]}
    shared = {name: results[name] for name in ("seed", "expected", "versions", "machine", "seconds")}
    row = {"recipe": {"row": results["recipe"]["row"]}, "metrics": dict(columns), "record": record}
    return {"fingerprint": fingerprint, **shared, **row}


def read_runs(folder: Path) -> dict[tuple[str, int], LeaderboardRun]:
    """Return the finished runs in the ``runs.json`` of a folder, by row and seed. Empty if there is no such file.

    Raises:
        DamagedFileError: If the file has another content.
    """
    path = folder / RUNS
    if not path.is_file():
        return {}
    content = read_json(path, "the runs of a leaderboard in ", _FORMAT, _HINT)
    try:
        runs = content["runs"]
        if any({*run} != _NAMES for run in runs):
            raise KeyError(", ".join(sorted(_NAMES)))
        return {(run["recipe"]["row"], int(run["seed"])): run for run in runs}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"Expected {path} to contain the runs of a leaderboard, but reading it failed: {error!r}.",
            hint=_HINT,
            value=path,
        ) from error


def write_runs(folder: Path, runs: Iterable[LeaderboardRun]) -> Path:
    """Write ``runs.json`` with one line for each run, sorted by row and seed. Return its path."""
    ordered = sorted(runs, key=lambda run: (run["recipe"]["row"], run["seed"]))
    lines = ",\n".join(json.dumps(run) for run in ordered)
    return write_atomic(folder / RUNS, f'{{"format": {_FORMAT}, "runs": [\n{lines}\n]}}\n')


def find_stored_runs(
    jobs: Mapping[str, Iterable[Job]], stored: Mapping[tuple[str, int], LeaderboardRun]
) -> dict[tuple[str, int], LeaderboardRun]:
    """Return the stored runs whose fingerprints are those of jobs, by row and seed.

    Args:
        jobs: Jobs of each row.
        stored: Runs by row and seed.
    """
    return {
        (row, job.seed): run
        for row, row_jobs in jobs.items()
        for job in row_jobs
        if (run := stored.get((row, job.seed))) is not None and run["fingerprint"] == job.fingerprint
    }
