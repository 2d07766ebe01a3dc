"""`lightning-fcl report`: HTML reports of finished runs, and tables that compare runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from lightning_fcl.cli.main import Command
from lightning_fcl.errors import MissingValueError
from lightning_fcl.evaluation.results import check_output_file, write_files
from lightning_fcl.evaluation.table import TableFormat, read_table
from lightning_fcl.io.atomic import write_atomic


class Report(Command):
    """Write report.html of a run, or one report that compares several runs.

    lightning-fcl report runs/mine                                       the report of a run
    lightning-fcl report runs/with runs/without                          a report that compares runs
    lightning-fcl report runs/with runs/without --table latex            a table instead of a report
    lightning-fcl report runs --table csv --out table.csv                all runs in a folder, all metrics
    lightning-fcl report runs --table markdown --metrics final_accuracy/server --reference without

    Folders seed-0, seed-1 and so on are the seeds of one row. From five seeds on, a table also contains the 95 %
    confidence interval of each mean, and a paired t-test of each row against the row --reference, with Holm's
    correction for several rows.
    """

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("runs", nargs="+", type=Path, metavar="RUN", help="read a run folder, or a folder of runs")
        add("--out", type=Path, metavar="FILE", help="write to FILE (default: RUN/report.html, or runs/report.html)")
        add("--table", choices=get_args(TableFormat), help="print a table instead of writing a report")
        add("--metrics", metavar="A,B", help="set the metrics of the table (default: main metrics)")
        add("--reference", metavar="ROW", help="compare the rows of the table with this row")

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.comparison import compare_page, find_runs, runs_by_name
        from lightning_fcl.evaluation.run_table import RunTable, headline_metrics

        if not options.table and (unused := [f"--{name}" for name in ("metrics", "reference") if vars(options)[name]]):
            raise MissingValueError(
                f"Expected `--table` with `{unused[0]}`, but got none.",
                hint="Add `--table markdown`.",
                argument="--table",
            )
        if options.out is not None:
            check_output_file(options.out)
        runs = find_runs(options.runs)
        if options.table:
            groups = runs_by_name(runs)
            metrics = [name.strip() for name in options.metrics.split(",")] if options.metrics else None
            if metrics is None and options.table != "csv":
                metrics = headline_metrics(groups)
            text = RunTable.from_runs(groups, metrics, options.reference).render(options.table)
            if options.out is None:
                print(text, end="")
                return
            options.out.parent.mkdir(parents=True, exist_ok=True)
            print(f"Wrote {write_atomic(options.out, text)}")
            return
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
