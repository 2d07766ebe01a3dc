"""Runs of recipes: side by side in processes, each continued from where an interruption left it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from lightning_fcl import __version__

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One run of one recipe.

    Args:
        label: How the run is shown.
        configs: The recipe's files, later ones over earlier ones.
        seed: Its seed.
        out: Its folder.
        extra: Further words of its command line.
    """

    label: str
    configs: tuple[Path, ...]
    seed: int
    out: Path
    extra: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The words of its command line."""
        return [
            "fit",
            *config_words(self.configs),
            "--seed_everything",
            str(self.seed),
            "--out",
            str(self.out),
            *self.extra,
        ]

    @property
    def fingerprint(self) -> str:
        """Changes when the run would be another one."""
        parts = [path.read_text() for path in self.configs] + [str(self.seed), __version__, *self.extra]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()


def config_words(recipes: Iterable[str | Path]) -> list[str]:
    """The words of a command line that name recipes, later ones over earlier ones."""
    return [word for recipe in recipes for word in ("--config", str(recipe))]


def run_jobs(jobs: Sequence[Job], workers: int | None) -> None:
    """Run jobs side by side, in a process per core or so many; each continues where an interruption left it."""
    todo = [job for job in jobs if not finished(job)]
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there already.", file=sys.stderr)
    if min(workers or os.cpu_count() or 1, len(todo)) <= 1:
        for number, job in enumerate(todo, 1):
            print(f"[{number}/{len(todo)}] {job.label}", file=sys.stderr)
            run_job(job)
        return
    with tqdm(total=len(todo), unit="run") as bar:
        for job, _ in side_by_side(run_job, todo, workers):
            bar.set_description_str(f"done: {job.label}")
            bar.update()


def side_by_side(
    function: Callable[[Job], T], jobs: Sequence[Job], workers: int | None
) -> Generator[tuple[Job, T], None, None]:
    """Call a function on each job, here or in several processes (None: one per core), what is done first first."""
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        yield from ((job, function(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _quiet_worker)
    futures = {pool.submit(function, job): job for job in jobs}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:  # not `with`: its exit would let what is still queued run to its end after an error
        pool.shutdown(cancel_futures=True)


def _quiet_worker() -> None:
    import torch

    torch.set_num_threads(1)  # several processes with several threads each get in each other's way
    os.environ["LIGHTNING_FCL_QUIET"] = "1"  # the progress of several runs at once would be unreadable


def finished(job: Job) -> bool:
    """Whether a job's results are there, and are of this very job."""
    stamp = job.out / "fingerprint"
    return (job.out / "results.json").is_file() and stamp.is_file() and stamp.read_text() == job.fingerprint


def run_job(job: Job) -> None:
    """Run one job, from its newest checkpoint if the same job was interrupted."""
    from lightning_fcl.cli.run import run, start_over
    from lightning_fcl.hub.checkpoint import newest_checkpoint

    stamp = job.out / "fingerprint"
    if not stamp.is_file() or stamp.read_text() != job.fingerprint:
        start_over(job.out)
        job.out.mkdir(parents=True, exist_ok=True)
        stamp.write_text(job.fingerprint)
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    more = ["--ckpt_path", str(checkpoint), "--weights_only", "true"] if checkpoint else []
    if os.environ.get("LIGHTNING_FCL_QUIET"):
        more += ["--trainer.enable_progress_bar", "false"]
    run([*job.arguments, *more])
