"""The search of `lightning-fcl leaderboard --search`: the best settings of each row in each case.

All trials of all searches share one pool of processes. The result of a row is written to ``settings.yaml`` as soon as
its trials have ended. A row whose entry in ``settings.yaml`` has the checksum of its search is not searched again.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_fcl.cli.jobs import Failure, Job, is_finished, print_resume_hint_on_stop, run_parallel, try_job
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.search_edges import edges, further_points
from lightning_fcl.cli.trials import mean_objective
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.runs.found_settings import FoundSettings, read_settings, values_text, write_settings
from lightning_fcl.runs.paper_rows import slug
from lightning_fcl.runs.recipe import short_names


@dataclass(frozen=True)
class SettingsTask:
    """One run of a trial.

    Args:
        search: Position of the search in the list of searches.
        trial: Number of the trial.
        job: The run.
    """

    search: int
    trial: int
    job: Job


def run_settings_task(task: SettingsTask) -> Failure | None:
    """Run the job of a task, unless it is finished or has failed before. Return its failure, or None."""
    return None if is_finished(task.job) else Failure.read(task.job) or try_job(task.job)


@dataclass
class RowSearch:
    """The search of the settings of a row in a case: a grid, and further settings beyond its ends.

    Args:
        case: Name of the case.
        row: Title of the row.
        search: The search file for this case and row.
        out: Folder of the trials.
    """

    case: str
    row: str
    search: Search
    out: Path
    points: list[dict[str, Any]] = field(init=False)
    failures: dict[int, Failure] = field(init=False, default_factory=dict)
    _num_grid: int = field(init=False)
    _num_running: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.search.sampler != "grid":
            raise InvalidValueError(
                f"Expected `sampler: grid` in the search file of {self.row}, but got {self.search.sampler}.",
                hint="Write `sampler: grid`, and a list of values for each setting of `space`.",
                argument="sampler",
                value=self.search.sampler,
            )
        overrides = self.search.case_overrides
        self.points = [
            {name: value for name, value in self.search.to_settings(point).items() if name not in overrides}
            for point in self.search.grid()
        ]
        self._num_grid = len(self.points)

    def jobs(self, trial: int) -> list[Job]:
        """Return the runs of a trial, one for each seed."""
        search, folder = self.search, self.out / f"trial-{trial:02}"
        overrides = {"recipe.eval_split": search.eval_split, "trainer.enable_progress_bar": False}
        recipe = search.recipe.with_values({**search.case_overrides, **self.points[trial], **overrides})
        return [
            Job(f"{self.case} {self.row}, trial {trial}, seed {seed}", recipe, seed, folder / f"seed-{seed}")
            for seed in range(search.first_seed, search.first_seed + search.seeds)
        ]

    @property
    def checksum(self) -> str:
        """Checksum of the recipe, the grid, the objective and the version of this library."""
        parts = [job.fingerprint for trial in range(self._num_grid) for job in self.jobs(trial)]
        parts += [self.search.objective, str(self.search.direction), str(sorted(self.search.limits.items()))]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]

    def has_written(self, entry: FoundSettings | None) -> bool:
        """Return whether an entry of ``settings.yaml`` is the result of this search, according to its checksum."""
        return entry is not None and entry.search == self.checksum

    def start(self, position: int) -> list[SettingsTask]:
        """Return the tasks of the grid. ``position`` is the position in the list of searches."""
        return self._tasks(position, range(self._num_grid))

    def end(self, task: SettingsTask, failure: Failure | None) -> list[SettingsTask]:
        """Record the end of a run, and return further tasks, after the last run of the grid."""
        if failure is not None:
            self.failures[task.trial] = failure
        self._num_running -= 1
        if self._num_running or len(self.points) > self._num_grid or (best := self._best()) is None:
            return []
        self.points += further_points(self.points, self.points[best[0]], self.search.limits)
        return self._tasks(task.search, range(self._num_grid, len(self.points)))

    @property
    def has_ended(self) -> bool:
        return self._num_running == 0

    def found(self) -> FoundSettings | None:
        """Return the result of the search, or None if all trials have failed."""
        if (best := self._best()) is None:
            return None
        point, names = self.points[best[0]], short_names(list(self.search.space))
        return FoundSettings(
            overrides=point,
            num_settings=len(self.points),
            num_failed=len(self.failures),
            score=round(best[1], 6),
            edge=[names[name] for name in edges(self.points, point)],
            search=self.checksum,
        )

    def _tasks(self, position: int, trials: Iterable[int]) -> list[SettingsTask]:
        tasks = [SettingsTask(position, trial, job) for trial in trials for job in self.jobs(trial)]
        self._num_running += len(tasks)
        return tasks

    def _best(self) -> tuple[int, float] | None:
        """Return the trial with the best value of the objective, and the value. None if all trials have failed."""
        sign = 1 if self.search.direction == "maximize" else -1
        values = {}
        for trial in (trial for trial in range(len(self.points)) if trial not in self.failures):
            value = mean_objective(self.jobs(trial), self.search.objective)
            if math.isfinite(value):
                values[trial] = value
            else:
                self.failures[trial] = Failure(f"{self.search.objective} is {value}", code="non-finite-objective")
        return max(values.items(), key=lambda item: sign * item[1], default=None)


class _Queue(Iterator[SettingsTask]):
    """The tasks of all searches. A search adds its grid when a worker is free, and further tasks at the front.

    After the end of the iteration, an added task continues the iteration.
    """

    def __init__(self, searches: list[RowSearch]) -> None:
        self._unstarted = deque(enumerate(searches))
        self._tasks = deque[SettingsTask]()

    def add(self, tasks: Iterable[SettingsTask]) -> None:
        self._tasks.extendleft(reversed([*tasks]))

    def __next__(self) -> SettingsTask:
        if not self._tasks and self._unstarted:
            position, search = self._unstarted.popleft()
            self._tasks.extend(search.start(position))
        if not self._tasks:
            raise StopIteration
        return self._tasks.popleft()


def search_settings(
    folder: Path, rows_by_case: Mapping[str, Mapping[str, str]], out: Path, workers: int | None
) -> None:
    """Search the settings of rows in cases, and write the best settings to ``settings.yaml`` in ``folder``.

    Args:
        folder: Folder with the search files.
        rows_by_case: Name of the search file of each row, by case and row.
        out: Folder of the trials.
        workers: Number of processes. None for one process per CPU core.

    Raises:
        InvalidStateError: If all trials of a row have failed. The other rows are searched before the error is raised.
        InvalidValueError: If a search file is invalid.
    """
    earlier_settings = read_settings(folder)
    searches = [
        RowSearch(case, row, Search.read(folder / file, case=case, row=row), out / slug(case) / slug(row))
        for case, files in rows_by_case.items()
        for row, file in files.items()
    ]
    todo = [one for one in searches if not one.has_written(earlier_settings.get(one.case, {}).get(one.row))]
    num_skipped = len(searches) - len(todo)
    if num_skipped:
        print(f"Already finished: {num_skipped} of {len(searches)} searches.", file=sys.stderr)
    num_ended, failed_searches = 0, list[RowSearch]()

    def so_far() -> str:
        return f"Finished: {num_skipped + num_ended} of {len(searches)} searches. Run the same command again to resume."

    queue = _Queue(todo)
    with print_resume_hint_on_stop(so_far), tqdm(total=len(todo), unit="search") as bar:
        for task, failure in run_parallel(run_settings_task, queue, workers):
            search = todo[task.search]
            queue.add(search.end(task, failure))
            if not search.has_ended:
                continue
            num_ended += 1
            bar.update()
            if (result := search.found()) is None:
                failed_searches.append(search)
                continue
            write_settings(folder, search.case, search.row, result)
            counts = f"{result.num_settings} settings, {result.num_failed} failed"
            tqdm.write(f"{search.case}, {search.row}: {result.score:.4f} with {values_text(result)} ({counts})")
    if failed_searches:
        first = failed_searches[0]
        names = ", ".join(f"{one.row} ({one.case})" for one in failed_searches)
        raise InvalidStateError(
            f"Expected a setting of each row to succeed, but all settings of {names} failed. First failure: "
            f"{next(iter(first.failures.values())).message.rstrip('.')}.",
            hint=f"Correct the cause, delete {first.out}, and run the same command again.",
        )
