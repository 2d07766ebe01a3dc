"""Runs of recipes: side by side in processes, each continued from where an interruption left it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

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

_FAILURE = "failure.txt"
_STAMP = "fingerprint"


@dataclass(frozen=True)
class Job:
    """One run of one recipe, of its first tasks or of all: it stays the same run, which goes on to more."""

    label: str
    recipe: Recipe
    seed: int
    out: Path
    tasks: int | None = None

    @property
    def whole_recipe(self) -> Recipe:
        """Its recipe with its seed and folder."""
        seeded_recipe = Recipe(self.recipe.files).with_values({"seed_everything": self.seed, "out": str(self.out)})
        return seeded_recipe.with_layers(*self.recipe.settings)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the recipe without its secrets, the seed and the version."""
        settings = Recipe(self.recipe.settings).words
        parts = [read_text(path) for path in self.recipe.files] + [str(self.seed), __version__, *settings]
        text = text_without_secrets("\x1f".join(parts), list(secrets_of(self.recipe.content())))
        return hashlib.sha256(text.encode()).hexdigest()

    def needs_run(self, results: Mapping[str, Any]) -> bool:
        """Whether it has tasks that a run of it which has come to these results was not to train."""
        trained: int | None = results.get("tasks")
        return trained is not None and (self.tasks is None or self.tasks > trained)

    def results(self) -> dict[str, Any]:
        """What it has come to, after its first tasks if no more are asked for."""
        results = read_results(self.out)
        if self.tasks is None or results.get("tasks") == self.tasks:
            return results
        record = truncate_record(results["record"], self.tasks)
        return results | {"record": record, "metrics": summarize(record), "tasks": self.tasks}

    def write_fingerprint(self, folder: Path) -> None:
        write_atomic(folder / _STAMP, self.fingerprint)

    def has_written(self, folder: Path) -> bool:
        """Whether what a folder holds is of this very job."""
        stamp = folder / _STAMP
        return stamp.is_file() and read_bytes(stamp) == self.fingerprint.encode()

    @property
    def is_foreign_folder(self) -> bool:
        """Whether its folder is of another job."""
        return (self.out / _STAMP).is_file() and not self.has_written(self.out)


@dataclass(frozen=True)
class Failure:
    """Why a run failed, as ``failure.txt`` in its folder tells.

    Args:
        message: The error in one line.
        error: Class of the error. Empty without an exception.
        code: Code of the error, as in `LightningFCLError`. Empty if the error has none.
    """

    message: str
    error: str = ""
    code: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure that an exception stands for."""
        kind = type(error)
        message = textwrap.shorten(f"{kind.__name__}: {error}", 400, placeholder=" ...")
        code = error.code if isinstance(error, LightningFCLError) else ""
        return cls(message, f"{kind.__module__}.{kind.__qualname__}", code)

    @classmethod
    def read(cls, job: Job) -> Failure | None:
        """Return why a job failed. None if it did not fail. A file of an earlier version has the message alone."""
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
        """Write the failure into the folder of a job."""
        write_atomic(job.out / _FAILURE, yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=500))

    def is_like(self, other: Failure) -> bool:
        """Return whether both have the same class and code of the error. Unknown ones are different."""
        kind = (self.error, self.code)
        return any(kind) and kind == (other.error, other.code)


def check_at_least_one(**arguments: int | None) -> None:
    """Refuse an option below 1, of those that are given."""
    at_least(1, **{name: number for name, number in arguments.items() if number is not None})


def run_jobs(jobs: Sequence[Job], workers: int | None) -> None:
    """Run jobs side by side, in a process per core or so many; each continues where an interruption left it."""
    todo = [job for job in jobs if not is_finished(job)]
    num_finished = len(jobs) - len(todo)
    if num_finished:
        print(f"{num_finished} of {len(jobs)} runs are there already.", file=sys.stderr)

    def so_far() -> str:
        return (
            f"{num_finished} of {len(jobs)} runs are finished; the same command goes on with the others where they "
            "were."
        )

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
                bar.set_description_str(f"done: {job.label}")
                bar.update()


@contextmanager
def print_resume_hint_on_stop(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Let a command that is told to stop in this block say what is finished and how to go on."""
    stop.how_to_go_on = how_to_go_on
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.number, how_to_go_on()) from None
    finally:
        stop.how_to_go_on = str


def run_parallel(
    function: Callable[[Job], T], jobs: Sequence[Job], workers: int | None
) -> Generator[tuple[Job, T], None, None]:
    """Call a function on each job, here or in several processes (None: one per core), what is done first first."""
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        yield from ((job, function(job)) for job in jobs)
        return

    def end_workers() -> str:
        for process in multiprocessing.active_children():
            process.terminate()
        return "ending the workers; each run goes on from its last round."

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        with stop.defer_stop(end_workers):
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is this process's alone
            try:
                futures: dict[Future[T], Job] = {pool.submit(function, job): job for job in jobs}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            yield from ((futures[future], future.result()) for future in as_completed(futures))
    except BrokenProcessPool as error:
        if not stop.signal:
            raise InvalidStateError(
                "Expected each worker to end its runs but one was killed, perhaps because memory ran out.",
                hint="Run the same command again, with fewer `--workers` to need less memory.",
            ) from error
    finally:  # not `with`: its exit would let what is still queued run to its end after an error
        pool.shutdown(cancel_futures=True)
    if stop.signal:
        raise Stopped(stop.signal, "the workers have ended.")


def _begin_worker() -> None:
    end_worker_with_parent()
    shorten_thread_errors()
    import torch

    torch.set_num_threads(1)  # several processes with several threads each get in each other's way


def is_finished(job: Job) -> bool:
    """Whether all files of a job are there and whole, and are of this very job."""
    return job.has_written(job.out) and is_complete(job.out) and not job.needs_run(read_results(job.out))


def run_job(job: Job) -> None:
    """Run one job, from its newest checkpoint if the same job was interrupted."""
    with run_lock(job.out):
        if not job.has_written(job.out):
            start_job(job)
        try:
            results = read_results(job.out)
        except (FileNotFoundError, ValueError):
            results = {"finished": False}
        if results["finished"] and not job.needs_run(results):
            write_files(job.out)  # what is missing beside the results
        else:
            _train(job)


def start_job(job: Job) -> None:
    """Remove what an earlier, different run has left in a job's folder, and sign it."""
    shutil.rmtree(job.out / "checkpoints", ignore_errors=True)
    clear_run(job.out)
    (job.out / _FAILURE).unlink(missing_ok=True)
    job.out.mkdir(parents=True, exist_ok=True)
    job.write_fingerprint(job.out)


def _train(job: Job) -> None:
    from lightning_fcl.io.checkpoint import newest_checkpoint

    with fast_imports():
        from lightning_fcl.runs.federated_cli import FederatedCLI
        from lightning_fcl.runs.fit import run_cli

    # One process: runs go side by side, the result is the same on any number, and others would start this command.
    overrides: dict[str, Any] = {"trainer.devices": 1, "trainer.num_nodes": 1}
    if checkpoint := newest_checkpoint(job.out / "checkpoints"):
        overrides["ckpt_path"] = str(checkpoint)
    if job.tasks:
        overrides["recipe.first_tasks"] = job.tasks
    if multiprocessing.parent_process() is not None:  # the progress of several runs at once would be unreadable
        overrides["trainer.enable_progress_bar"] = False
    run_cli("fit", job.whole_recipe.with_values(overrides), FederatedCLI)
