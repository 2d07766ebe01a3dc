"""`lightning-fcl report`: HTML reports of finished runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.main import Command
from lightning_fcl.evaluation.results import write_files
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.io.atomic import write_atomic


class Report(Command):
    """Write report.html of a run, or one report that compares several runs."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="read a run folder, or a folder of runs")
        parser.add_argument(
            "--out", type=Path, metavar="FILE", help="write to FILE (default: RUN/report.html, or runs/report.html)"
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.comparison import compare_page, find_runs, runs_by_name

        runs = find_runs(options.runs)
        single_folder = options.runs[0] if len(options.runs) == 1 else None
        if runs == [single_folder] and options.out is None:
            print(f"Wrote {write_files(runs[0])}")
            return
        table = (
            read_table(single_folder / "table.json")
            if single_folder and (single_folder / "table.json").is_file()
            else None
        )
        out: Path = options.out or (single_folder or Path("runs")) / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        print(f"Wrote {write_atomic(out, compare_page(runs_by_name(runs), table))}")
