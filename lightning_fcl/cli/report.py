"""`lightning-fcl report`: pages of finished runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.main import Command
from lightning_fcl.evaluation.results import write_files
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.io.atomic import write_atomic


class Report(Command):
    """Write report.html of a run; of several, one page with all of them side by side."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds runs")
        parser.add_argument(
            "--out", type=Path, metavar="FILE", help="the page (default: report.html in the only folder)"
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.comparison import compare_page, find_runs, runs_by_name

        runs = find_runs(options.runs)
        single_folder = options.runs[0] if len(options.runs) == 1 else None
        if runs == [single_folder] and options.out is None:
            print(f"Written: {write_files(runs[0])}")
            return
        table = (
            read_table(single_folder / "table.json")
            if single_folder and (single_folder / "table.json").is_file()
            else None
        )
        out: Path = options.out or (single_folder or Path("runs")) / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        print(f"Written: {write_atomic(out, compare_page(runs_by_name(runs), table))}")
