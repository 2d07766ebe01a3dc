"""`lightning-fcl leaderboard`: comparison of methods under the same protocols."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from lightning_fcl.cli.jobs import check_at_least_one
from lightning_fcl.cli.main import Command
from lightning_fcl.cli.reproduce import match_names, run_rows
from lightning_fcl.evaluation.table import Table, write_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import (
    expand_grids,
    list_protocols,
    paper_folder,
    read_rows,
    slug,
)


class Leaderboard(Command):
    """Train methods under the same protocols, and write a table of all protocols and a chart for each protocol.

    To use the results of --search, copy OUT/searches/best to recipes/leaderboard/best.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--protocols", help='select protocols by prefix, as in "P4,P7" (default: all)')
        add("--methods", help="select methods, separated by commas (default: all)")
        add("--seeds", type=int, default=3, metavar="N", help="train with N seeds, 0 to N-1 (default: 3)")
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
        add("--finished-only", action="store_true", help="write the table of finished runs, without training")

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.charts import write_png
        from lightning_fcl.evaluation.leaderboard import leaderboard_chart, leaderboard_row, leaderboard_table

        check_at_least_one(seeds=options.seeds, workers=options.workers)
        folder, out = paper_folder("leaderboard"), options.out
        content = read_rows(folder)
        protocols = list_protocols(content)
        protocol_names = match_names(options.protocols, [*protocols], "protocols", beginnings=True)
        available_methods = list(dict.fromkeys(method for name in protocol_names for method in protocols[name]))
        methods = match_names(options.methods, available_methods, "methods")
        if options.search:
            entries = expand_grids(content)
            searches = {method: file for method in methods if (file := entries[method].search) is not None}
            search_settings(folder, searches, out / "searches", options.workers)
            return
        rows = [f"{name} {method}" for name in protocol_names for method in protocols[name] if method in methods]
        jobs = run_rows(folder, rows, "paper", options.seeds, None, out, options.workers, options.finished_only)
        runs = [job.results() for of in jobs.values() for job in of]
        words = [f"--{name}={value}" for name in ("protocols", "methods") if (value := getattr(options, name))]
        command = shlex.join(["lightning-fcl", "leaderboard", *words, "--seeds", str(options.seeds)])
        table = Table.from_results(
            [one | {"metrics": leaderboard_row(one)} for one in runs], "leaderboard", "paper", command
        )
        as_json, _ = write_table(out, table)
        for name in protocol_names:
            if table_text := leaderboard_table(table, name, protocols[name]):
                print(f"{name}\n\n{table_text}\n")
            if chart := leaderboard_chart(table, name, protocols[name]):
                write_png(out / f"{slug(name)}.png", chart)
        print(f"Runs: {len(runs)}, in {out}/*/seed-*/report.html\nTable: {as_json}\nCharts: {out}/*.png")


def search_settings(folder: Path, searches: Mapping[str, str], out: Path, workers: int | None) -> None:
    """Run the search of each method, and write one recipe per method, with the best settings, to ``out/best``.

    Args:
        folder: Folder with the search files.
        searches: Name of the search file, by method.
        out: Output folder.
        workers: Number of processes. None for one process per CPU core.
    """
    from lightning_fcl.cli.tune import Tune  # Importing Optuna takes a second.

    (out / "best").mkdir(parents=True, exist_ok=True)
    tune, parser = Tune(), ArgumentParser()
    tune.arguments(parser)
    for method, file in searches.items():
        print(f"{method}: {file}")
        words = [str(folder / file), "--row", method, "--out", str(out / slug(method))]
        tune.run(parser.parse_args(words + ([] if workers is None else ["--workers", str(workers)])))
        search_command = shlex.join(["lightning-fcl", "leaderboard", "--search", "--methods", method])
        best = read_text(out / slug(method) / "best.yaml").splitlines(keepends=True)
        recipe = "".join(line for line in best if not line.startswith("#"))
        write_atomic(
            out / "best" / f"{slug(method)}.yaml",
            f"# Best settings of the search {file}. Found by: {search_command}\n{recipe}",
        )
    print(f"Best settings of each search: {out / 'best'}")
