"""Fault injection with random faults: kills, full disks, damaged files, and invalid recipes.

    python tests/reliability/run.py --seed 7 --cases kills=100 disks=10 --minutes 60 --write docs/reliability.md

A case is a function with three arguments: the campaign, a random generator and an empty folder. It returns an
`Outcome`. To add a case, write the function and add it to `CASES` with its default number. The seed of a case consists
of the campaign's seed, the case's name and its index. To repeat case 17 of `kills`, pass the same `--seed` and
`--cases kills=1 --first 17`. For `recipes`, also pass the same number of cases. The exit code is 1 if an outcome is not
"fine".
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import date
from pathlib import Path

import damage
import endings
from campaign import KINDS, ROOT, Campaign, Outcome

import recipes

CASES: dict[str, tuple[Callable[[Campaign, random.Random, Path], Outcome], int, str]] = {
    "kills": (endings.kill, 100, "A command gets SIGKILL, SIGTERM or SIGINT at a random time, and is started again."),
    "disks": (
        endings.fill,
        10,
        "A command runs with a random limit of file size, and is started again without the limit.",
    ),
    "checkpoints": (damage.checkpoint_byte, 250, "One byte of a checkpoint is changed, and a fit is resumed from it."),
    "results": (
        damage.results_byte,
        250,
        "One byte in a file of a finished search is changed, and the search is started again.",
    ),
    "folders": (damage.copied_run, 40, "The folder of a run is copied with other file times, and the copy is resumed."),
    "files": (
        damage.unusable_file,
        40,
        "A file of a run is replaced by a named pipe, a device or an empty file, and the run is resumed.",
    ),
    "recipes": (recipes.mutated_recipe, 500, "One to three places of a recipe are changed (hypothesis)."),
}
"""The function, the default number of cases, and a description, by the name of the case."""


def report(seed: int, outcomes: dict[str, list[Outcome]], page: Path | None) -> str:
    """Return a Markdown page of the outcomes, and write the JSON file of the page.

    Rows of cases that were not run come from the JSON file of the page. Without ``page``, no file is used.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    rows = json.loads(page.with_suffix(".json").read_text()) if page and page.with_suffix(".json").exists() else {}
    for name, of in outcomes.items():
        rows[name] = {
            "command": f"--seed {seed} --cases {name}={len(of)}",
            "when": f"{date.today()}, {commit.strip()}",
            "counts": Counter(outcome.kind for outcome in of),
            "wrong": [f"{outcome.kind}: {outcome.what}" for outcome in of if outcome.kind != "fine"],
        }
    lines = [
        "# Reliability\n",
        "This page lists the results of fault injection: commands are killed, disks are filled, and files are damaged",
        "at random. A case is *fine* if the command stops with one error message, or ends with the same result as",
        "without the fault. In both cases no process and no temporary file is left. During its first 0.1 s a command",
        "does not handle Ctrl-C, and Python prints a traceback. This command writes each row:\n",
        "    make test-fault-injection ARGS='--write docs/reliability.md --seed ... --cases ...'\n",
        f"| fault | `ARGS` | date, commit | cases | {' | '.join(KINDS)} |",
        f"| --- | --- | --- | ---: | {' | '.join('---:' for _ in KINDS)} |",
    ]
    for name in (name for name in CASES if name in rows):
        row, counts = rows[name], Counter(rows[name]["counts"])
        cells = [CASES[name][2], f"`{row['command']}`", row["when"], counts.total(), *(counts[kind] for kind in KINDS)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    wrong = [f"- {name}: {what}" for name, row in rows.items() for what in row["wrong"]]
    if page:
        page.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    return "\n".join([*lines, *(["\n## Failed cases\n", *wrong] if wrong else [])]) + "\n"


@functools.cache
def _campaign(scratch: str, seed: int, numbers: tuple[tuple[str, int], ...]) -> Campaign:
    return Campaign(Path(tempfile.mkdtemp(dir=scratch)), seed, dict(numbers))


def run_case(scratch: str, seed: int, numbers: tuple[tuple[str, int], ...], name: str, index: int) -> Outcome:
    """Run one case in an empty folder, and return its outcome."""
    campaign = _campaign(scratch, seed, numbers)
    folder = campaign.folder / f"{name}-{index}"
    folder.mkdir()
    try:
        return CASES[name][0](campaign, random.Random(f"{seed} {name} {index}"), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the cases, print the page of the outcomes, and write the page if `--write` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", nargs="+", default=[f"{name}={number}" for name, (_, number, _) in CASES.items()])
    parser.add_argument("--first", type=int, default=0, help="start with the case of this index")
    parser.add_argument("--minutes", type=float, default=600, help="stop starting cases after this number of minutes")
    parser.add_argument("--processes", type=int, default=1, help="run this number of cases in parallel")
    parser.add_argument("--write", type=Path, help="write the results to this Markdown page")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    numbers = tuple((name, int(number)) for name, number in (case.split("=") for case in options.cases))
    outcomes: dict[str, list[Outcome]] = {name: [] for name, _ in numbers}
    until = time.monotonic() + 60 * options.minutes
    cases = ((name, index) for name, number in numbers for index in range(options.first, options.first + number))
    with (
        tempfile.TemporaryDirectory(prefix="reliability-") as scratch,
        ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        running: dict[Future[Outcome], tuple[str, int]] = {}
        while True:
            while len(running) < options.processes and time.monotonic() < until and (case := next(cases, None)):
                running[pool.submit(run_case, scratch, options.seed, numbers, *case)] = case
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                (name, index), outcome = running.pop(future), future.result()
                outcomes[name].append(outcome)
                print(f"{name} {index}: {outcome.kind}: {outcome.what}\n{outcome.said}".rstrip(), flush=True)
    page = report(options.seed, outcomes, options.write)
    print(page)
    if options.write is not None:
        options.write.write_text(page)
    sys.exit(any(outcome.kind != "fine" for of in outcomes.values() for outcome in of))


if __name__ == "__main__":
    main()
