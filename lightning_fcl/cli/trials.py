"""Runs of trials in parallel processes. With a pruner, the seeds of a trial run sequentially."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from lightning_fcl.cli.jobs import Failure, Job, is_finished, run_parallel, try_job
from lightning_fcl.cli.pruning import Pruning, TrialReporter
from lightning_fcl.evaluation.results import read_results


@dataclass(frozen=True)
class TrialTask:
    """A part of a trial that one worker runs: one seed, or all seeds if the trial can be pruned.

    Args:
        number: Number of the trial.
        jobs: Runs of this part.
        num_parts: Number of parts of the trial.
        pruning: Pruner of the trial. None if the trial cannot be pruned.
    """

    number: int
    jobs: tuple[Job, ...]
    num_parts: int
    pruning: Pruning | None = None


@dataclass(frozen=True)
class TrialOutcome:
    """The end of a part of a trial.

    Args:
        failure: Failure of a run. None if all runs are finished, or if the trial was pruned.
        reported: The trial with the values that it reported. None without a pruner.
        is_pruned: Whether the trial was pruned.
    """

    failure: Failure | None = None
    reported: FrozenTrial | None = None
    is_pruned: bool = False


def make_tasks(number: int, jobs: Sequence[Job], pruning: Pruning | None) -> list[TrialTask]:
    """Return the tasks of a trial: one for each seed, or one for all seeds if there is a pruner."""
    parts = [tuple(jobs)] if pruning is not None else [(job,) for job in jobs]
    return [TrialTask(number, part, len(parts), pruning) for part in parts]


def run_trials(tasks: Iterable[TrialTask], workers: int | None) -> Iterator[tuple[int, TrialOutcome]]:
    """Run tasks in parallel processes, and yield the number and outcome of each trial when all its tasks have ended.

    Args:
        tasks: The tasks. Of a sequence, only the tasks without a recorded outcome are sent to workers.
        workers: Number of processes. None for one process per CPU core.
    """
    recorded: list[tuple[TrialTask, TrialOutcome]] = []
    if isinstance(tasks, Sequence):
        outcomes = [(task, _recorded_outcome(task)) for task in tasks]
        recorded = [(task, outcome) for task, outcome in outcomes if outcome is not None]
        tasks = [task for task, outcome in outcomes if outcome is None]
    by_trial: dict[int, list[TrialOutcome]] = {}
    with closing(run_parallel(run_task, tasks, workers)) as finished_tasks:
        for task, outcome in itertools.chain(recorded, finished_tasks):
            parts = by_trial.setdefault(task.number, [])
            parts.append(outcome)
            if len(parts) == task.num_parts:
                yield task.number, next((one for one in by_trial.pop(task.number) if one.failure), outcome)


def run_task(task: TrialTask) -> TrialOutcome:
    """Run the jobs of a task until a run fails or the trial is pruned. Finished runs are not run again."""
    if task.pruning is None:
        failures = (Failure.read(job) or try_job(job) for job in task.jobs if not is_finished(job))
        return TrialOutcome(next(filter(None, failures), None))
    reporter = TrialReporter(task.pruning)
    for job in task.jobs:
        _report_results(job, reporter)
        if not (reporter.is_pruned or is_finished(job)):
            failure = Failure.read(job) or try_job(job, reporter.should_stop)
            if failure is not None:
                return TrialOutcome(failure, reporter.trial)
        if reporter.is_pruned:
            break
        reporter.end_seed()
    return TrialOutcome(reported=reporter.trial, is_pruned=reporter.is_pruned)


def _recorded_outcome(task: TrialTask) -> TrialOutcome | None:
    """Return the outcome of a task whose runs have all ended, or None if a run must be trained or resumed."""
    if task.pruning is None:
        (job,) = task.jobs
        failure = Failure.read(job)
        return TrialOutcome(failure) if failure or is_finished(job) else None
    if not _has_results(task.jobs[0]):
        return None
    reporter = TrialReporter(task.pruning)
    for job in task.jobs:
        if failure := Failure.read(job):
            return TrialOutcome(failure, reporter.trial)
        _report_results(job, reporter)
        if reporter.is_pruned:
            return TrialOutcome(reported=reporter.trial, is_pruned=True)
        if not is_finished(job):
            return None
        reporter.end_seed()
    return TrialOutcome(reported=reporter.trial)


def _has_results(job: Job) -> bool:
    return job.has_written(job.out) and (job.out / "results.json").is_file()


def _report_results(job: Job, reporter: TrialReporter) -> None:
    """Report the values of the rounds in ``results.json``, if there is such a file of this job."""
    if _has_results(job):
        reporter.should_stop(read_results(job.out)["record"])


def mean_objective(jobs: Sequence[Job], objective: str) -> float:
    """Return the mean of a metric over finished runs. NaN if a run has no value."""
    values = [read_results(job.out)["metrics"].get(objective) for job in jobs]
    return statistics.fmean(math.nan if value is None else value for value in values)
