"""`lightning-fcl reproduce`: the runs and the table of a paper."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_fcl.cli.jobs import Job, check_at_least_one, is_finished, run_jobs, start_job
from lightning_fcl.cli.main import Command
from lightning_fcl.errors import MissingValueError, UnknownNameError
from lightning_fcl.evaluation.results import read_results, write_files, write_results
from lightning_fcl.evaluation.table import Table, with_tasks, write_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import (
    paper_folder,
    paper_rows,
    read_rows,
    scale_folder,
    scaled_configs,
)
from lightning_fcl.validation import did_you_mean


class Reproduce(Command):
    """Run a paper's recipes, over seeds, to one table and its figures.

    Finished runs that lie beside a paper's recipes are taken in place of running them again: ``recipes/PAPER/SCALE/``
    (``recipes/PAPER/`` for the paper's own scale) has them as ``--out`` has, each with ``results.json`` and its
    fingerprint.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("paper", help="name of a folder of recipes, as in: flwf")
        add("--rows", help="rows of the paper's table, separated by commas (default: all)")
        add("--seeds", type=int, default=1, metavar="N", help="seeds 0..N-1 (default: 1)")
        add(
            "--scale",
            choices=("smoke", "small", "medium", "paper"),
            default="paper",
            help="size of the runs (default: paper)",
        )
        add(
            "--tasks",
            type=int,
            metavar="N",
            help="first tasks of each run (default: all); the same run goes on to more",
        )
        add("--out", type=Path, help="folder of the results (default: runs/PAPER-SCALE)")
        add("--workers", type=int, metavar="N", help="processes (default: one per core)")
        add("--finished-only", action="store_true", help="run nothing: the table is of the runs that are finished")
        add(
            "--commit-runs",
            action="store_true",
            help="keep the runs beside the recipes, where the same command takes them from",
        )

    def run(self, options: Namespace) -> None:
        """Run a paper's recipes and write their table: what is finished already, or kept beside them, is not run again.

        The table has the metrics of which the paper tells a number, and those that ``rows.yaml`` lists.
        """
        paper, seeds, scale, workers = options.paper, options.seeds, options.scale, options.workers
        folder = paper_folder(paper)
        check_at_least_one(seeds=seeds, workers=workers, tasks=options.tasks)
        out = options.out or Path("runs") / f"{paper}-{scale}"
        row_names = [row.strip() for row in options.rows.split(",")] if options.rows else None
        content = read_rows(folder)
        figures = [one for one in content.get("figures", []) if scale in one.get("scales", [scale])]
        jobs = run_rows(folder, row_names, scale, seeds, options.tasks, out, workers, options.finished_only)
        table_command = _command(paper, scale, seeds, options.rows, options.tasks, options.finished_only)
        results = {name: [job.results() for job in runs] for name, runs in jobs.items()}
        all_results = [one for runs in results.values() for one in runs]
        table = Table.from_results(all_results, paper, scale, table_command)
        expected = (name for one in all_results for name in one["expected"])
        if metrics := list(dict.fromkeys([*content.get("metrics", []), *expected])):
            table = table.select_metrics(metrics)
        if scale == "paper" and "gains" in content:
            table = with_tasks(table, results, content["gains"])
        _write(out, table, results, figures)
        for name, runs in jobs.items() if options.commit_runs else ():
            for job in runs:
                target = scale_folder(folder, scale) / job.out.relative_to(out)
                target.mkdir(parents=True, exist_ok=True)
                command = _command(paper, scale, job.seed + 1, name, options.tasks)
                write_results(target, read_results(job.out) | {"command": command}, indent=None)
                job.write_fingerprint(target)
                print(f"Kept: {target}")


def run_rows(
    folder: Path,
    row_names: Sequence[str] | None,
    scale: str,
    seeds: int,
    tasks: int | None,
    out: Path,
    workers: int | None,
    only_finished: bool,
) -> dict[str, list[Job]]:
    """The runs of a paper's rows, or of the rows asked for: finished, kept beside the recipes, or else run now."""
    jobs: dict[str, list[Job]] = {}
    for name, row in paper_rows(folder, row_names, scale).items():
        recipe, row_folder = replace(row, configs=scaled_configs(row.configs, scale)).recipe, out / row.slug
        jobs[name] = [
            Job(f"{name}, seed {seed}", recipe, seed, row_folder / f"seed-{seed}", tasks) for seed in range(seeds)
        ]
    committed_folder = scale_folder(folder, scale)
    reuse_committed_runs([job for runs in jobs.values() for job in runs], out, committed_folder)
    if only_finished:
        jobs = {
            name: finished_jobs
            for name, runs in jobs.items()
            if (finished_jobs := [job for job in runs if is_finished(job)])
        }
        if not jobs:
            raise MissingValueError(
                f"Expected finished runs in {out} or {committed_folder} but there are none.",
                hint="Leave out `--finished-only`, which trains the runs.",
            )
    run_jobs([job for runs in jobs.values() for job in runs], workers)
    return jobs


def _command(
    paper: str, scale: str, seeds: int, rows: str | None, tasks: int | None, only_finished: bool = False
) -> str:
    """The command line that comes to the same numbers."""
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
    """Write the table and the figures of some rows, and print their paths."""
    from lightning_fcl.evaluation.comparison import compare_page  # here and below: what draws takes time to import
    from lightning_fcl.evaluation.paper_figures import write_figures

    all_results = [one for runs in results.values() for one in runs]
    as_json, markdown = write_table(out, table)
    figure_paths = write_figures(out, figures, results)
    print(read_text(markdown))
    if figure_paths:
        print(f"Figures: {', '.join(map(str, figure_paths))}")
    page = write_atomic(out / "report.html", compare_page(results, table))
    print(
        f"{len(all_results)} runs. Table: {markdown} and {as_json}; all in one page: {page}; of each run: "
        f"{out}/*/seed-*/report.html"
    )


def reuse_committed_runs(jobs: Sequence[Job], out: Path, committed: Path) -> None:
    """Bring kept runs of the same fingerprint to where those of jobs that are not finished would be."""
    number = 0
    for job in jobs:
        source, reason = committed / job.out.relative_to(out), ""
        if is_finished(job) or not (source / "results.json").is_file():
            continue
        try:
            results = read_results(source)
            if not job.has_written(source):
                reason = f"Expected {source} to be of this recipe, seed and version but its fingerprint is another."
            elif job.needs_run(results):
                reason = f"Expected {source} to be of all tasks that are asked for but it is of {results['tasks']}."
        except ValueError as error:
            reason = str(error)
        if reason:
            print(f"{job.label} is run anew: {reason}", file=sys.stderr)
            continue
        start_job(job)
        write_results(job.out, results)
        write_files(job.out)
        number += 1
    if number:
        print(f"{number} of {len(jobs)} runs are taken from {committed}.", file=sys.stderr)


def match_names(text: str | None, known_names: list[str], argument_name: str, beginnings: bool = False) -> list[str]:
    """The known names that are asked for, by their beginnings if so; all of them if none are."""
    if text is None:
        return known_names
    selected_names: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        fits = [name for name in known_names if name == word or (beginnings and name.startswith(word))]
        if not fits:
            raise UnknownNameError(
                f"Expected `{argument_name}` among {', '.join(known_names)} but got {word}.",
                hint=did_you_mean(word, known_names),
                argument=argument_name,
                value=word,
            )
        selected_names += fits
    return list(dict.fromkeys(selected_names))
