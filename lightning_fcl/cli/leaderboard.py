"""`lightning-fcl leaderboard`: comparison of methods under the same protocols."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fcl.cli.jobs import check_at_least_one, is_finished
from lightning_fcl.cli.leaderboard_runs import (
    RUNS,
    LeaderboardRun,
    find_stored_runs,
    read_runs,
    reduce_results,
    write_runs,
)
from lightning_fcl.cli.leaderboard_statistics import StatisticsPlan
from lightning_fcl.cli.main import Command
from lightning_fcl.cli.reproduce import make_jobs, match_names, run_rows
from lightning_fcl.evaluation.table import Table, write_table_json
from lightning_fcl.runs.found_settings import read_settings, settings_file, settings_table
from lightning_fcl.runs.paper_rows import (
    expand_grids,
    list_cases,
    list_protocols,
    paper_folder,
    read_rows,
    slug,
)

# Number of seeds of rows whose grid in `rows.yaml` does not specify the number.
_SEEDS = 5
# Metrics of the clients by the column of the leaderboard.
_OF_CLIENTS = {
    "last_accuracy": "final_accuracy",
    "forgetting": "forgetting",
    "learning_accuracy": "learning_accuracy",
}
# Columns that exist only for the server.
_OF_SERVER = ("incremental_accuracy", "anytime_accuracy", "bytes_accuracy")


class Leaderboard(Command):
    """Train methods under the same protocols, and write a table of all protocols and a chart for each protocol.

    --search searches the settings of each method in each case, and writes the best settings to settings.yaml in the
    recipe folder. The same command resumes an interrupted search. To search a method again, delete its entry there.
    The planned comparisons in rows.yaml are tested with Holm's correction, if both methods have at least 5 seeds.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--protocols", help='select protocols by prefix, as in "P4,P7" (default: all)')
        add("--methods", help="select methods, separated by commas (default: all)")
        add(
            "--seeds",
            type=int,
            metavar="N",
            help=f"train every row with N seeds, 0 to N-1 (default: `seeds` in rows.yaml, or {_SEEDS})",
        )
        add(
            "--out",
            type=Path,
            default=Path("runs/leaderboard"),
            help="set the output folder (default: runs/leaderboard)",
        )
        add("--workers", type=int, metavar="N", help="set the number of processes (default: CPU cores)")
        add(
            "--search",
            action="store_true",
            help="only search for the hyperparameters of the methods",
        )
        add("--cases", help='with --search: select cases by prefix, as in "beta .5" (default: all)')
        add("--finished-only", action="store_true", help="write the table of finished runs, without training")
        add(
            "--commit-runs",
            action="store_true",
            help="add the runs and the tables to the recipe folder, to reuse them on any machine",
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.leaderboard import leaderboard_row

        check_at_least_one(seeds=options.seeds, workers=options.workers)
        folder, out = paper_folder("leaderboard"), options.out
        content = read_rows(folder)
        protocols = list_protocols(content)
        plan = StatisticsPlan.read(content, protocols)
        protocol_names = match_names(options.protocols, [*protocols], "protocols", beginnings=True)
        available_methods = list(dict.fromkeys(method for name in protocol_names for method in protocols[name]))
        methods = match_names(options.methods, available_methods, "methods")
        entries, files_by_case = expand_grids(content), list_cases(content, protocol_names)
        if options.search:
            from lightning_fcl.cli.settings_search import search_settings

            cases = match_names(options.cases, [*files_by_case], "cases", beginnings=True)
            files = {
                case: {row: file for row, file in files_by_case[case].items() if row in methods and file is not None}
                for case in cases
            }
            search_settings(folder, files, out / "searches", options.workers)
            _print_settings(folder, cases, methods)
            return
        rows = [f"{name} {method}" for name in protocol_names for method in protocols[name] if method in methods]
        seeds = {row: options.seeds or entries[row].seeds or _SEEDS for row in rows}
        jobs = make_jobs(folder, rows, "paper", seeds, None, out)
        stored = read_runs(folder)
        runs = find_stored_runs(jobs, stored)
        if runs:
            print(f"Reused {len(runs)} runs from {folder / RUNS}.", file=sys.stderr)
        remaining_jobs = {
            row: [job for job in row_jobs if (row, job.seed) not in runs] for row, row_jobs in jobs.items()
        }
        if any(remaining_jobs.values()) and not (options.finished_only and runs):
            finished_jobs = run_rows(remaining_jobs, folder, out, options.workers, options.finished_only)
        else:
            finished_jobs = {
                row: [job for job in row_jobs if is_finished(job)] for row, row_jobs in remaining_jobs.items()
            }
        for row, row_jobs in finished_jobs.items():
            for job in row_jobs:
                results = job.results()
                columns = columns_of(entries[row].model, leaderboard_row(results), results)
                runs[row, job.seed] = reduce_results(results, columns, job.fingerprint, row in plan.rows)
        words = [f"--{name}={value}" for name in ("protocols", "methods") if (value := getattr(options, name))]
        words += [] if options.seeds is None else ["--seeds", str(options.seeds)]
        board = Board(content, plan, shlex.join(["lightning-fcl", "leaderboard", *words]))
        print(board.write(out, runs.values()))
        _print_settings(folder, files_by_case, methods)
        print(f"Runs: {len(runs)}, in {out}/*/seed-*/report.html\nTable: {out / 'table.json'}\nCharts: {out}/*.png")
        if options.commit_runs:
            number = _commit_runs(folder, out, runs, stored, Board(content, plan, "lightning-fcl leaderboard"))
            print(f"Committed {number} runs to {folder / RUNS}")


@dataclass(frozen=True)
class Board:
    """The tables, charts and statistics of the leaderboard.

    Args:
        content: Content of ``rows.yaml``.
        plan: Planned comparisons and ranking.
        command: Command of the runs.
    """

    content: Mapping[str, Any]
    plan: StatisticsPlan
    command: str

    def write(self, folder: Path, runs: Iterable[LeaderboardRun]) -> str:
        """Write the table, the charts and the statistics of runs to a folder. Return the tables as text."""
        from lightning_fcl.evaluation.charts import write_png
        from lightning_fcl.evaluation.leaderboard import leaderboard_chart, leaderboard_table

        ordered = sorted(runs, key=lambda run: (run["recipe"]["row"], run["seed"]))
        table = Table.from_results(ordered, "leaderboard", "paper", self.command)
        write_table_json(folder, table)
        notes, bounds = list_protocols(self.content, "method"), list_protocols(self.content, "bound")
        parts = []
        for name in list_protocols(self.content):
            if table_text := leaderboard_table(table, name, notes.get(name, {})):
                parts.append(f"{name}\n\n{table_text}\n")
            if table_text := leaderboard_table(table, name, bounds.get(name, {})):
                parts.append(f"{name}: bounds\n\n{table_text}\n")
            if chart := leaderboard_chart(table, name, notes.get(name, {})):
                write_png(folder / f"{slug(name)}.png", chart)
        return "\n".join([*parts, *filter(None, [self.plan.write(folder, table, ordered)])])


def _commit_runs(
    folder: Path,
    out: Path,
    runs: Mapping[tuple[str, int], LeaderboardRun],
    stored: Mapping[tuple[str, int], LeaderboardRun],
    board: Board,
) -> int:
    """Write runs and the tables of all runs to the recipe folder, and return the number of all runs.

    Stored runs of rows that were not selected are kept if their recipes have not changed.

    Args:
        folder: Recipe folder.
        out: Output folder of the command.
        runs: New and reused runs, by row and seed.
        stored: Runs that the recipe folder contains.
        board: Tables, charts and statistics of the leaderboard.
    """
    entries = expand_grids(board.content)
    num_seeds = {row: seed + 1 for row, seed in sorted(stored) if row in entries}
    stored_jobs = make_jobs(folder, [*num_seeds], "paper", num_seeds, None, out) if num_seeds else {}
    all_runs = {**find_stored_runs(stored_jobs, stored), **runs}
    write_runs(folder, all_runs.values())
    board.write(folder, all_runs.values())
    return len(all_runs)


def columns_of(model: str, columns: Mapping[str, float], results: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns of a run of the leaderboard, with the accuracy of the clients if the row needs it.

    Args:
        model: ``model`` of the row, see `RowEntry`. With ``"clients"``, the last accuracy, the learning accuracy and
            the forgetting are means over the clients. Columns that exist only for the server are then left out.
        columns: Values of the columns for the server.
        results: Content of ``results.json`` of the run.

    Example:
        >>> metrics = {"final_accuracy/clients": 0.2, "forgetting/clients": 0.1}
        >>> columns = {"last_accuracy": 0.01, "incremental_accuracy": 0.01, "rounds": 9.0}
        >>> columns_of("clients", columns, {"metrics": metrics})
        {'last_accuracy': 0.2, 'rounds': 9.0, 'forgetting': 0.1}
    """
    if model == "server":
        return dict(columns)
    server_columns = {name: value for name, value in columns.items() if name not in _OF_SERVER}
    metrics = {column: results["metrics"].get(f"{name}/clients") for column, name in _OF_CLIENTS.items()}
    return server_columns | {column: value for column, value in metrics.items() if value is not None}


def _print_settings(folder: Path, cases: Iterable[str], methods: Iterable[str]) -> None:
    """Print the found settings of methods in cases, with the number of searched settings, and the path of the file."""
    if table_text := settings_table(read_settings(folder), cases, methods):
        print(f"{table_text}\n\nSettings: {settings_file(folder)}")
