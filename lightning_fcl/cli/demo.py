"""`lightning-fcl demo`: the quickstart, compared with plain fine-tuning."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from lightning_fcl.cli.jobs import Job, run_jobs
from lightning_fcl.evaluation.comparison import compare_page, runs_by_name
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.headline import headlines
from lightning_fcl.evaluation.table import markdown_table
from lightning_fcl.running.rows import recipes_folder


def arguments(parser: ArgumentParser) -> None:
    parser.description = "Run and compare the quickstart."
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")


def run(options: Namespace) -> None:
    out: Path = options.out
    recipe = recipes_folder() / "quickstart.yaml"
    finetuning = out / "fine-tuning.yaml"
    out.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_load(recipe.read_text())
    label = content["recipe"]["row"]
    content["trainer"]["callbacks"] = []
    content["recipe"]["row"] = "fine-tuning"
    finetuning.write_text(yaml.safe_dump(content, sort_keys=False))
    jobs = [
        Job("fine-tuning", (finetuning,), 0, out / "fine-tuning"),
        Job(label, (recipe,), 0, out / "flwf-2t-replay"),
    ]
    run_jobs(jobs, workers=1)
    results = runs_by_name([job.out for job in jobs])
    page = write_whole(out / "report.html", compare_page(results))
    numbers = {label: {one.name: one.text for one in headlines(result)} for label, (result,) in results.items()}
    columns = list(dict.fromkeys(name for of in numbers.values() for name in of))
    print("\n" + markdown_table(["", *columns], [[label, *of.values()] for label, of in numbers.items()]))
    print(f"\nBoth side by side: {page}; each alone: {jobs[0].out}/report.html and {jobs[1].out}/report.html")
