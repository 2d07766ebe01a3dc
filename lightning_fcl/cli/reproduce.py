"""`lightning-fcl reproduce`: train the rows of a table, compare them with expected values, and draw figures."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_fcl.cli.fast_imports import fast_imports
from lightning_fcl.cli.jobs import Job, check_at_least_one, is_finished, run_jobs, start_job
from lightning_fcl.cli.main import Command
from lightning_fcl.errors import (
    InvalidValueError,
    LightningFCLError,
    MissingFileError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.evaluation.results import read_results, write_files, write_results
from lightning_fcl.evaluation.table import NEAR_TOLERANCE, Table, with_tasks, write_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import (
    list_papers,
    paper_folder,
    paper_rows,
    read_rows,
    rows_file,
    scale_folder,
    scaled_configs,
    slug,
)
from lightning_fcl.runs.rows_check import check_rows
from lightning_fcl.validation import did_you_mean


class Reproduce(Command):
    """Train the rows of a table over several seeds, compare them with expected values, and draw figures.

    A table of your own is a file:
      base: base.yaml                       # recipe that all rows share, relative to this file
      rows:
        FedAvg: fedavg.yaml                 # a recipe, which overrides the base
        Replay 50:                          # or a mapping, in which every key is optional
          configs: [replay.yaml]            # recipes, which override the base
          overrides: {trainer.callbacks.Replay.memory_size: 50}
          expected: {final_accuracy/server: 0.83}
      tolerance: 0.05                       # or one number per metric (default: 0.05)
      metrics: [final_accuracy/server]      # columns of the table (default: metrics with an expected value)
      figures:
        - file: accuracy.png
          kind: stream_accuracy             # or average_accuracy, communication, volume_by_round, activation_density
          panels: {Digits: {no replay: FedAvg, 50 samples: Replay 50}}
    Complete example: docs/experiments.md.

    Runs in the recipe folder are reused if they have the fingerprint (recipe, seed and version) of the requested runs.
    The folder is recipes/PAPER/SCALE, or recipes/PAPER for the scale "paper". It has one folder per run, as in --out,
    with results.json and the fingerprint. For a table of your own, it is the folder of the file.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("paper", metavar="PAPER|ROWS.yaml", help="select a paper such as flwf, or a file with rows of your own")
        add("--rows", help="select rows of the table, separated by commas (default: all)")
        add("--seeds", type=int, default=1, metavar="N", help="train with N seeds, 0 to N-1 (default: 1)")
        add(
            "--scale",
            choices=("smoke", "small", "medium", "paper"),
            default="paper",
            help="set the size of the runs (default: paper)",
        )
        add(
            "--tasks",
            type=int,
            metavar="N",
            help="train only the first N tasks; to continue, use a larger N",
        )
        add("--out", type=Path, help="set the output folder (default: runs/PAPER-SCALE, or runs/NAME)")
        add("--workers", type=int, metavar="N", help="set the number of processes (default: CPU cores)")
        add("--finished-only", action="store_true", help="write the table of finished runs, without training")
        add(
            "--commit-runs",
            action="store_true",
            help="copy the runs to the recipe folder, to reuse them",
        )

    def run(self, options: Namespace) -> None:
        """Train the rows and write the table. Finished runs and reusable runs are not trained again.

        The table contains the metrics with an expected value, and the metrics listed in ``rows.yaml``. If there are no
        such metrics, the table contains all metrics of the runs.
        """
        paper, seeds, scale, workers = options.paper, options.seeds, options.scale, options.workers
        name, folder = find_rows(paper)
        check_at_least_one(seeds=seeds, workers=workers, tasks=options.tasks)
        check_rows(folder, scale)
        is_plain = scale == "paper" and name != paper  # A table of your own has no paper.
        out = options.out or Path("runs") / (name if is_plain else f"{name}-{scale}")
        row_names = [row.strip() for row in options.rows.split(",")] if options.rows else None
        content = read_rows(folder)
        figures = [one for one in content.get("figures", []) if scale in one.get("scales", [scale])]
        jobs = make_jobs(folder, row_names, scale, seeds, options.tasks, out)
        jobs = run_rows(jobs, scale_folder(rows_file(folder).parent, scale), out, workers, options.finished_only)
        table_command = _command(paper, scale, seeds, options.rows, options.tasks, options.finished_only)
        results = {name: [job.results() for job in runs] for name, runs in jobs.items()}
        all_results = [one for runs in results.values() for one in runs]
        table = Table.from_results(all_results, name, scale, table_command)
        table = table.with_tolerance(content.get("tolerance", NEAR_TOLERANCE))
        expected = (name for one in all_results for name in one["expected"])
        if metrics := list(dict.fromkeys([*content.get("metrics", []), *expected])):
            table = table.select_metrics(metrics)
        if scale == "paper" and "gains" in content:
            table = with_tasks(table, results, content["gains"])
        _write(out, table, results, figures)
        for row_name, runs in jobs.items() if options.commit_runs else ():
            for job in runs:
                target = scale_folder(rows_file(folder).parent, scale) / job.out.relative_to(out)
                target.mkdir(parents=True, exist_ok=True)
                command = _command(paper, scale, job.seed + 1, row_name, options.tasks)
                write_results(target, read_results(job.out) | {"command": command})
                job.write_fingerprint(target)
                print(f"Copied the run to {target}")


def find_rows(paper: str) -> tuple[str, Path]:
    """Return the name of a table, and the path of its rows: the folder of a paper, or a file.

    Args:
        paper: Name of a paper of the package, path of a ``rows.yaml``, or path of its folder. The name of a file of
            your own is the name of its folder for ``rows.yaml``, otherwise the name of the file.

    Raises:
        MissingFileError: If the file does not exist.
        UnknownNameError: If the paper is unknown.
    """
    path = Path(paper)
    is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_absolute()
    if not is_path and (paper in list_papers() or not (path / "rows.yaml").is_file()):
        if paper not in list_papers():
            raise UnknownNameError(
                f"Expected `paper` to be among {', '.join(list_papers())}, or the path of a file with rows, but got "
                f"{paper}.",
                hint=did_you_mean(paper, list_papers()) or "Pass a file, as in `lightning-fcl reproduce rows.yaml`.",
                argument="paper",
                value=paper,
            )
        return paper, paper_folder(paper)
    file = rows_file(path)
    if not file.is_file():
        raise MissingFileError(
            f"Expected a file with rows at {file}, but there is no such file.",
            hint="Pass an existing file, or the name of a paper such as flwf.",
            argument="paper",
            value=str(file),
        )
    return slug(file.resolve().parent.name if file.stem == "rows" else file.stem) or "rows", file


def make_jobs(
    folder: Path,
    row_names: Sequence[str] | None,
    scale: str,
    seeds: int | Mapping[str, int],
    tasks: int | None,
    out: Path,
) -> dict[str, list[Job]]:
    """Return the jobs of rows of a paper's table, by row.

    Args:
        folder: Recipe folder of the paper, or the file with the rows.
        row_names: Rows to train. None for all rows.
        scale: Scale of the runs.
        seeds: Number of seeds of all rows, or of each row by its name.
        tasks: Number of tasks to train, starting with the first task. None for all tasks.
        out: Output folder.
    """
    jobs: dict[str, list[Job]] = {}
    for name, row in paper_rows(folder, row_names, scale).items():
        recipe, row_folder = replace(row, configs=scaled_configs(row.configs, scale)).recipe, out / row.slug
        if recipe.content().get("recipe", {}).get("row") != name:
            recipe = recipe.with_values({"recipe.row": name})
        jobs[name] = [
            Job(f"{name}, seed {seed}", recipe, seed, row_folder / f"seed-{seed}", tasks)
            for seed in range(seeds if isinstance(seeds, int) else seeds[name])
        ]
    return jobs


def run_rows(
    jobs: dict[str, list[Job]], committed_folder: Path, out: Path, workers: int | None, only_finished: bool
) -> dict[str, list[Job]]:
    """Train rows of a paper's table, and return the jobs of each row, by row.

    Finished runs, and runs in the recipe folder with the same fingerprint, are not trained again.

    Args:
        jobs: Jobs of each row.
        committed_folder: Folder with committed runs.
        out: Output folder.
        workers: Number of processes. None for one process per CPU core.
        only_finished: Whether to return only finished runs, without training.

    Raises:
        MissingValueError: If ``only_finished`` is True and no run is finished.
    """
    reuse_committed_runs([job for runs in jobs.values() for job in runs], out, committed_folder)
    if only_finished:
        jobs = {
            name: finished_jobs
            for name, runs in jobs.items()
            if (finished_jobs := [job for job in runs if is_finished(job)])
        }
        if not jobs:
            raise MissingValueError(
                f"Expected finished runs in {out} or {committed_folder}, but there are none.",
                hint="Remove `--finished-only`, to train the runs.",
            )
    check_recipes(jobs)
    run_jobs([job for runs in jobs.values() for job in runs], workers)
    return jobs


def check_recipes(jobs: Mapping[str, Sequence[Job]]) -> None:
    """Raise InvalidValueError if `fit` rejects the recipe of a row with unfinished runs."""
    with fast_imports():
        from lightning_fcl.runs.fit import resolve_recipe
    for name, runs in jobs.items():
        if all(is_finished(job) for job in runs):
            continue
        try:
            resolve_recipe(runs[0].recipe)
        except LightningFCLError as error:
            raise InvalidValueError(
                f"Expected `fit` to accept the recipe of row {name}, but got: {error}",
                argument=error.argument,
                value=error.value,
            ) from error


def _command(
    paper: str, scale: str, seeds: int, rows: str | None, tasks: int | None, only_finished: bool = False
) -> str:
    """Return the command line that reproduces the table of a paper with these options."""
    words = ["--rows", rows] if rows else []
    words += ["--scale", scale] if scale != "paper" else []
    words += ["--tasks", str(tasks)] if tasks else []
    words += ["--seeds", str(seeds), *(["--finished-only"] if only_finished else [])]
    return shlex.join(["lightning-fcl", "reproduce", paper, *words])


def _write(
    out: Path,
    table: Table,
    results: Mapping[str, list[dict[str, Any]]],
    figures: Sequence[Mapping[str, Any]],
) -> None:
    """Write the table, the figures and the report, and print the paths of the files."""
    # Modules that draw figures are imported here, because their import is slow.
    from lightning_fcl.evaluation.comparison import compare_page
    from lightning_fcl.evaluation.paper_figures import write_figures

    all_results = [one for runs in results.values() for one in runs]
    as_json, markdown = write_table(out, table)
    figure_paths = write_figures(out, figures, results)
    print(read_text(markdown))
    if figure_paths:
        print(f"Figures: {', '.join(map(str, figure_paths))}")
    page = write_atomic(out / "report.html", compare_page(results, table))
    if text := table.verdict_text():
        print(text)
    print(f"Runs: {len(all_results)}, in {out}/*/seed-*/report.html\nTable: {markdown} and {as_json}\nReport: {page}")


def reuse_committed_runs(jobs: Sequence[Job], out: Path, committed: Path) -> None:
    """Copy runs with the same fingerprint from the recipe folder to the folders of unfinished jobs."""
    number = 0
    for job in jobs:
        source, reason = committed / job.out.relative_to(out), ""
        if is_finished(job) or not (source / "results.json").is_file():
            continue
        try:
            results = read_results(source)
            if not job.has_written(source):
                reason = f"Expected a run of this recipe, seed and version in {source}, but the fingerprint differs."
            elif job.needs_run(results):
                reason = (
                    f"Expected a run of all requested tasks in {source}, but the run has only {results['tasks']} of "
                    "the tasks."
                )
        except ValueError as error:
            reason = str(error)
        if reason:
            print(f"Did not reuse a run for {job.label}: {reason}", file=sys.stderr)
            continue
        start_job(job)
        write_results(job.out, results)
        write_files(job.out)
        number += 1
    if number:
        print(f"Reused {number} of {len(jobs)} runs from {committed}.", file=sys.stderr)


def match_names(text: str | None, known_names: list[str], argument_name: str, beginnings: bool = False) -> list[str]:
    """Return the known names that a list separated by commas selects, or all known names if there is no list.

    Args:
        text: The list. None for all known names.
        known_names: The known names.
        argument_name: Name of the argument in error messages.
        beginnings: Whether the list may contain prefixes of names.

    Raises:
        UnknownNameError: If an entry of the list matches no known name.
    """
    if text is None:
        return known_names
    selected_names: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        fits = [name for name in known_names if name == word or (beginnings and name.startswith(word))]
        if not fits:
            raise UnknownNameError(
                f"Expected `{argument_name}` to be among {', '.join(known_names)}, but got {word}.",
                hint=did_you_mean(word, known_names),
                argument=argument_name,
                value=word,
            )
        selected_names += fits
    return list(dict.fromkeys(selected_names))
