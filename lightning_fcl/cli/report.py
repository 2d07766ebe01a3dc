"""`lightning-fcl report`: the page of a run written anew, or several runs side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.evaluation.comparison import compare_page, runs_below, runs_by_name
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.results import write_files
from lightning_fcl.evaluation.table import read_table


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Write report.html of a run; of several, one page with all of them side by side."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the only folder)")


def run(options: Namespace) -> None:
    runs = runs_below(options.runs)
    alone = options.runs[0] if len(options.runs) == 1 else None
    if runs == [alone] and options.out is None:
        print(f"Written: {write_files(runs[0])}")
        return
    table = read_table(alone / "table.json") if alone and (alone / "table.json").is_file() else None
    out: Path = options.out or (alone or Path("runs")) / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"Written: {write_whole(out, compare_page(runs_by_name(runs), table))}")
