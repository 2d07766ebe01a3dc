"""`lightning-fcl demo`: ten digits on ten clients, with and without a method against forgetting."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_fcl.cli.jobs import Job, run_jobs
from lightning_fcl.cli.main import Command
from lightning_fcl.evaluation.summary import summary_metrics
from lightning_fcl.evaluation.table import markdown_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.runs.paper_rows import (
    recipes_folder,
)
from lightning_fcl.runs.recipe import Recipe


class Demo(Command):
    """Train the quickstart, and compare it with fine-tuning."""

    def arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--out", type=Path, default=Path("runs/demo"), help="set the output folder (default: runs/demo)"
        )

    def run(self, options: Namespace) -> None:
        from lightning_fcl.evaluation.comparison import compare_page, runs_by_name

        out: Path = options.out
        recipe = Recipe((recipes_folder() / "quickstart.yaml",))
        plain = recipe.with_values({"trainer.callbacks": [], "recipe.row": "fine-tuning"})
        jobs = [
            Job("fine-tuning", plain, 0, out / "fine-tuning"),
            Job("quickstart", recipe, 0, out / "flwf-2t-replay"),
        ]
        run_jobs(jobs, workers=1)
        results = runs_by_name([job.out for job in jobs])
        page = write_atomic(out / "report.html", compare_page(results))
        numbers = {
            label: {one.name: one.text for one in summary_metrics(result)} for label, (result,) in results.items()
        }
        columns = list(dict.fromkeys(name for of in numbers.values() for name in of))
        print("\n" + markdown_table(["", *columns], [[label, *of.values()] for label, of in numbers.items()]))
        print(f"\nComparison: {page}\nSingle runs: {jobs[0].out}/report.html and {jobs[1].out}/report.html")
