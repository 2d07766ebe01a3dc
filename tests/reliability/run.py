"""What a run survives, tried at random: kills, full disks, damaged and evil files.

    python tests/reliability/run.py --seed 7 --cases kills=100 disks=10 --minutes 60 --write docs/reliability.md

A case is a function of the campaign, a random generator and an empty folder that gives an `Outcome`; to add one, write
it and name it in `CASES` with its usual number. Its seed is the campaign's, the case's name and its number, so any one
can be repeated: `--cases kills=1 --first 17`. Exit 1: some outcome is not fine.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
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
import evil
from campaign import KINDS, ROOT, Campaign, Outcome

import recipes

CASES: dict[str, tuple[Callable[[Campaign, random.Random, Path], Outcome], int, str]] = {
    "kills": (endings.kill, 100, "A command gets SIGKILL, SIGTERM or SIGINT at a random moment, and is started again."),
    "disks": (endings.fill, 10, "No file may grow beyond a random size; then there is room, and it is started again."),
    "checkpoints": (damage.checkpoint_byte, 250, "A byte of a checkpoint changes, from which a fit then goes on."),
    "results": (damage.results_byte, 250, "A byte changes in a file of a finished search, which is started again."),
    "recipes": (recipes.mutated_recipe, 500, "One to three places of a recipe change (hypothesis)."),
    "evil": (evil.evil_file, len(evil.EVIL), "A file that would call something, or never end."),
}
"""A name's case, its usual number, and what it does."""


def report(seed: int, outcomes: dict[str, list[Outcome]]) -> str:
    """The campaign as a Markdown page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    counts = {name: Counter(outcome.kind for outcome in of) for name, of in outcomes.items()}
    words = " ".join(f"{name}={len(of)}" for name, of in outcomes.items())
    lines = [
        "# Reliability\n",
        "What became of commands to which something happened at random. *Fine*: what was not refused in one message",
        "ended as if nothing had happened; nothing was called, left running or left over. Written by\n",
        f"    make test-campaign ARGS='--seed {seed} --cases {words} --write docs/reliability.md'\n",
        f"on {date.today()}, commit {commit.strip()}, {os.cpu_count()} cores.\n",
        f"| what happened | cases | {' | '.join(KINDS)} |",
        f"| --- | ---: | {' | '.join('---:' for _ in KINDS)} |",
        *(
            f"| {CASES[n][2]} | {len(of)} | {' | '.join(str(counts[n][k]) for k in KINDS)} |"
            for n, of in outcomes.items()
        ),
    ]
    wrong = [f"- {n}: {o.kind}: {o.what}" for n, of in outcomes.items() for o in of if o.kind != "fine"]
    return "\n".join([*lines, *(["\n## What went wrong\n", *wrong] if wrong else [])]) + "\n"


@functools.cache
def _campaign(scratch: str, seed: int, numbers: tuple[tuple[str, int], ...]) -> Campaign:
    return Campaign(Path(tempfile.mkdtemp(dir=scratch)), seed, dict(numbers))


def run_case(scratch: str, seed: int, numbers: tuple[tuple[str, int], ...], name: str, index: int) -> Outcome:
    """Run one case in an empty folder."""
    campaign = _campaign(scratch, seed, numbers)
    folder = campaign.folder / f"{name}-{index}"
    folder.mkdir()
    try:
        return CASES[name][0](campaign, random.Random(f"{seed} {name} {index}"), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run a campaign and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", nargs="+", default=[f"{name}={number}" for name, (_, number, _) in CASES.items()])
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--minutes", type=float, default=600, help="no case begins after so many")
    parser.add_argument("--processes", type=int, default=1, help="cases that run side by side")
    parser.add_argument("--write", type=Path, help="where the page is written")
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
    page = report(options.seed, outcomes)
    print(page)
    if options.write is not None:
        options.write.write_text(page)
    sys.exit(any(outcome.kind != "fine" for of in outcomes.values() for outcome in of))


if __name__ == "__main__":
    main()
