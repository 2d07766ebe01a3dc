"""Runs of several recipes in parallel processes. Interrupted runs are resumed."""

from __future__ import annotations

import hashlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml
from tqdm import tqdm

from lightning_fcl import __version__
from lightning_fcl.cli.fast_imports import fast_imports
from lightning_fcl.errors import InvalidStateError, LightningFCLError
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.record import truncate_record
from lightning_fcl.evaluation.results import clear_run, is_complete, read_results, write_files
from lightning_fcl.io.atomic import run_lock, write_atomic
from lightning_fcl.io.reading import read_bytes, read_text
from lightning_fcl.io.safe_yaml import load_yaml
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.runs.secret_values import secrets_of, text_without_secrets
from lightning_fcl.runs.signals import Stopped, end_worker_with_parent, shorten_thread_errors, stop
from lightning_fcl.validation import at_least

T = TypeVar("T")
Task = TypeVar("Task")
ShouldStop: TypeAlias = Callable[[Mapping[str, Any]], bool]
"""A function that gets the record of a run after each round, and returns whether the run stops after this round."""

_FAILURE = "failure.txt"
_STAMP = "fingerprint"


@dataclass(frozen=True)
class Job:
    """A run of a recipe with a seed. The results are written to a folder.

    Args:
        label: Name of the run in messages.
        recipe: The recipe.
        seed: Random seed.
        out: Folder of the run.
        tasks: Number of tasks to train, starting with the first task. None for all tasks. The same run can be resumed
            with more tasks.
    """

    label: str
    recipe: Recipe
    seed: int
    out: Path
    tasks: int | None = None

    @property
    def whole_recipe(self) -> Recipe:
        """The recipe with the seed and the folder of the run."""
        return self.recipe.with_values({"seed_everything": self.seed, "out": str(self.out)})

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the recipe (without its secrets), the seed, and the version of this library."""
        settings = Recipe(self.recipe.settings).words
        parts = [read_text(path) for path in self.recipe.files] + [str(self.seed), __version__, *settings]
        kinds = [isinstance(layer, Path) for layer in self.recipe.layers]
        if kinds != sorted(kinds, reverse=True):  # A file overrides an earlier setting.
            parts.append(str(kinds))
        text = text_without_secrets("\x1f".join(parts), list(secrets_of(self.recipe.content())))
        return hashlib.sha256(text.encode()).hexdigest()

    def needs_run(self, results: Mapping[str, Any]) -> bool:
        """Return whether this job requests more tasks than a run has trained.

        Args:
            results: Content of ``results.json`` of the run. If it has no ``tasks``, the run has trained all tasks.
        """
        trained: int | None = results.get("tasks")
        return trained is not None and (self.tasks is None or self.tasks > trained)

    def results(self) -> dict[str, Any]:
        """Return the content of ``results.json`` of the run of this job.

        If the run has trained more tasks than this job requests, the record and the metrics are limited to the
        requested tasks.
        """
        results = read_results(self.out)
        if self.tasks is None or results.get("tasks") == self.tasks:
            return results
        record = truncate_record(results["record"], self.tasks)
        return results | {"record": record, "metrics": summarize(record), "tasks": self.tasks}

    def write_fingerprint(self, folder: Path) -> None:
        """Write the fingerprint of this job to a folder."""
        write_atomic(folder / _STAMP, self.fingerprint)

    def has_written(self, folder: Path) -> bool:
        """Return whether a folder contains a run of this job, according to its fingerprint."""
        stamp = folder / _STAMP
        return stamp.is_file() and read_bytes(stamp) == self.fingerprint.encode()

    @property
    def is_foreign_folder(self) -> bool:
        """Whether the folder of this job contains a run of another job."""
        return (self.out / _STAMP).is_file() and not self.has_written(self.out)


@dataclass(frozen=True)
class Failure:
    """The reason why a run failed, which is stored in ``failure.txt`` in the folder of the run.

    Args:
        message: Error message in one line.
        error: Full name of the exception class. Empty if there was no exception.
        code: Error code, as in `LightningFCLError`. Empty if the exception has no code.
    """

    message: str
    error: str = ""
    code: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure that describes an exception."""
        kind = type(error)
        message = textwrap.shorten(f"{kind.__name__}: {error}", 400, placeholder=" ...")
        code = error.code if isinstance(error, LightningFCLError) else ""
        return cls(message, f"{kind.__module__}.{kind.__qualname__}", code)

    @classmethod
    def read(cls, job: Job) -> Failure | None:
        """Return the failure in the folder of a job, or None if the folder contains no failure of this job.

        Files that an older version has written contain only the message.
        """
        file = job.out / _FAILURE
        if not job.has_written(job.out) or not file.is_file():
            return None
        text = read_text(file)
        with suppress(yaml.YAMLError):
            content = load_yaml(text)
            if isinstance(content, dict) and {*content} == {"error", "code", "message"}:
                return cls(**{name: str(value) for name, value in content.items()})
        return cls(text)

    def write(self, job: Job) -> None:
        """Write the failure to the folder of a job."""
        write_atomic(job.out / _FAILURE, yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=500))

    def is_like(self, other: Failure) -> bool:
        """Return whether two failures have the same exception class and code. False if no class and code are known."""
        kind = (self.error, self.code)
        return any(kind) and kind == (other.error, other.code)


def check_at_least_one(**arguments: int | None) -> None:
    """Raise ValueError if an option is below 1. Options that are None are not checked."""
    at_least(1, **{name: number for name, number in arguments.items() if number is not None})


def run_jobs(jobs: Sequence[Job], workers: int | None) -> None:
    """Run jobs in parallel processes, and resume interrupted jobs.

    Args:
        jobs: The jobs. Finished jobs are skipped.
        workers: Number of processes. None for one process per CPU core.
    """
    todo = [job for job in jobs if not is_finished(job)]
    num_finished = len(jobs) - len(todo)
    if num_finished:
        print(f"Already finished: {num_finished} of {len(jobs)} runs.", file=sys.stderr)

    def so_far() -> str:
        return f"Finished: {num_finished} of {len(jobs)} runs. Run the same command again to resume the remaining runs."

    with print_resume_hint_on_stop(so_far):
        if min(workers or os.cpu_count() or 1, len(todo)) <= 1:
            for job in todo:
                print(f"[{num_finished + 1}/{len(jobs)}] {job.label}", file=sys.stderr)
                run_job(job)
                num_finished += 1
            return
        with tqdm(total=len(todo), unit="run") as bar:
            for job, _ in run_parallel(run_job, todo, workers):
                num_finished += 1
                bar.set_description_str(f"finished: {job.label}")
                bar.update()


@contextmanager
def print_resume_hint_on_stop(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Temporarily set the text that is printed if a signal stops the command.

    The function ``how_to_go_on`` returns the text: the number of finished runs, and how to resume the remaining runs.
    """
    stop.how_to_go_on = how_to_go_on
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.number, how_to_go_on()) from None
    finally:
        stop.how_to_go_on = str


def run_parallel(
    function: Callable[[Task], T], tasks: Iterable[Task], workers: int | None
) -> Generator[tuple[Task, T], None, None]:
    """Call a function for each task, and yield the results in the order in which the tasks finish.

    Args:
        function: The function, which must be picklable.
        tasks: The tasks, which must be picklable. The next task is requested when a worker is free, after the caller
            has processed the results so far.
        workers: Number of processes. None for one process per CPU core. With 1, the tasks run in this process.

    Raises:
        InvalidStateError: If a worker process was killed.
        Stopped: If this process received a signal. All workers have ended before the error is raised.
    """
    workers = workers or os.cpu_count() or 1
    workers = min(workers, len(tasks)) if isinstance(tasks, Sequence) else workers
    if workers <= 1:
        yield from ((task, function(task)) for task in tasks)
        return
    remaining_tasks, futures = iter(tasks), dict[Future[T], Task]()

    def end_workers() -> str:
        for process in multiprocessing.active_children():
            process.terminate()
        return "stopping the workers. Each run can be resumed from its newest checkpoint."

    def submit(number: int) -> None:
        next_tasks = list(itertools.islice(remaining_tasks, number))
        # Workers inherit the blocked signal, so that only this process handles Ctrl-C.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            futures.update({pool.submit(function, task): task for task in next_tasks})
            # The pool watches only the workers that it had started before its last event. Without this event, it would
            # not notice that the newest worker was killed until another worker finishes its task.
            pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        with stop.defer_stop(end_workers):
            submit(workers)
            while futures:
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    yield futures.pop(future), future.result()
                    submit(1)
    except BrokenProcessPool as error:
        if not stop.signal:
            raise InvalidStateError(
                "Expected all workers to finish their runs, but a worker was killed, possibly because memory ran out.",
                hint="Run the same command again. To reduce memory, use fewer workers with `--workers`.",
            ) from error
    finally:  # The exit of a `with` block would run the queued tasks after an error.
        pool.shutdown(cancel_futures=True)
    if stop.signal:
        raise Stopped(stop.signal, "the workers have stopped.")


def _begin_worker() -> None:
    end_worker_with_parent()
    shorten_thread_errors()
    import torch

    torch.set_num_threads(1)  # Several processes with several threads each would slow each other down.


def is_finished(job: Job) -> bool:
    """Return whether the folder of a job contains a complete run of this job."""
    return job.has_written(job.out) and is_complete(job.out) and not job.needs_run(read_results(job.out))


def run_job(job: Job, should_stop: ShouldStop | None = None) -> None:
    """Run a job. An interrupted run of the same job is resumed from its newest checkpoint.

    Args:
        job: The job.
        should_stop: Function that can stop the run after a round. A run that it stops is not finished.
    """
    with run_lock(job.out):
        if not job.has_written(job.out):
            start_job(job)
        try:
            results = read_results(job.out)
        except (FileNotFoundError, ValueError):
            results = {"finished": False}
        if results["finished"] and not job.needs_run(results):
            write_files(job.out)  # Write missing files, such as the report.
        else:
            _train(job, should_stop)


def try_job(job: Job, should_stop: ShouldStop | None = None) -> Failure | None:
    """Run a job with one thread. If the job fails, write the failure to the job's folder, and return the failure.

    Args:
        job: The job.
        should_stop: Function that can stop the run after a round.

    Raises:
        OSError: If the operating system rejects an operation, for example on a full disk. The other jobs then stop,
            because the error does not depend on the job.
    """
    import torch

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # Lines about seeds would break the progress bar.
    torch.set_num_threads(1)  # The number of threads changes the last digits of results, and workers use one thread.
    try:
        run_job(job, should_stop)
    except OSError:
        raise
    except Exception as error:
        failure = Failure.of(error)
        failure.write(job)
        return failure
    (job.out / _FAILURE).unlink(missing_ok=True)
    return None


def start_job(job: Job) -> None:
    """Delete the files of an earlier run from the folder of a job, and write the fingerprint of the job."""
    shutil.rmtree(job.out / "checkpoints", ignore_errors=True)
    clear_run(job.out)
    (job.out / _FAILURE).unlink(missing_ok=True)
    job.out.mkdir(parents=True, exist_ok=True)
    job.write_fingerprint(job.out)


def _train(job: Job, should_stop: ShouldStop | None) -> None:
    from lightning_fcl.io.checkpoint import newest_checkpoint

    with fast_imports():
        import lightning.pytorch as L

        from lightning_fcl.data.trainer_access import get_callbacks
        from lightning_fcl.runs.federated_cli import FederatedCLI
        from lightning_fcl.runs.fit import run_cli
        from lightning_fcl.runs.run_callbacks import StopOnRecord

    class JobCLI(FederatedCLI):
        """A command line whose runs `should_stop` can stop."""

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            if should_stop is not None:
                get_callbacks(trainer).append(StopOnRecord(should_stop))
            return trainer

    # Use one process per run. Several runs are trained in parallel, and further processes of a run would start this
    # command again. The results do not depend on the number of processes.
    overrides: dict[str, Any] = {"trainer.devices": 1, "trainer.num_nodes": 1}
    if checkpoint := newest_checkpoint(job.out / "checkpoints"):
        overrides["ckpt_path"] = str(checkpoint)
    if job.tasks:
        overrides["recipe.first_tasks"] = job.tasks
    if multiprocessing.parent_process() is not None:  # Progress bars of several runs would overwrite each other.
        overrides["trainer.enable_progress_bar"] = False
    run_cli("fit", job.whole_recipe.with_values(overrides), JobCLI)
