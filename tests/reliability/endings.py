"""Fault-injection cases with interruptions.

A command is killed at a random time or has a full disk. Then the command is started again.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from campaign import ROOT, Campaign, Command, Outcome, comes_to, same, small_recipe

from lightning_fcl.runs.recipe import Recipe


@dataclass(frozen=True)
class Work:
    """A command that is interrupted and started again.

    Args:
        name: Name of the command in reports.
        words: Arguments of the command, without ``--out``.
        fit: Whether the second start passes ``--ckpt_path``, if there is a checkpoint. Other commands resume from their
            output folder.
    """

    name: str
    words: tuple[str, ...]
    fit: bool = False

    def first(self) -> list[str]:
        """Return the arguments for the first start."""
        return [*self.words, "--out", "out"]

    def again(self, folder: Path) -> list[str]:
        """Return the arguments for the second start. A fit gets ``--ckpt_path`` with its newest checkpoint, if any."""
        found = sorted((folder / "out" / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        return [*self.first(), *(["--ckpt_path", str(found[-1])] if self.fit and found else [])]


def works(folder: Path) -> list[Work]:
    """Return the commands to interrupt.

    The commands are a fit of the quickstart, a fit with a client store on disk, and a search. Rows of papers are
    included if their data sets are available.
    """
    recipes = small_recipe(folder)
    words = tuple(Recipe(tuple(map(Path, recipes))).words)
    disk = ("--trainer.strategy.init_args.client_store", "disk")
    search = folder / "search.yaml"
    lr = {"model.init_args.optimizer.init_args.lr": [0.1, 0.05, 0.02]}
    search.write_text(
        yaml.safe_dump({"configs": recipes, "objective": "final_accuracy/server", "sampler": "grid", "space": lr})
    )
    found = [
        Work("fit", ("fit", *words), fit=True),
        Work("fit, store on disk", ("fit", *words, *disk), fit=True),
        Work("tune", ("tune", str(search), "--workers", "2")),
    ]
    return [*found, *(work for work, data in PAPERS.items() if all(map(_is_there, data)))]


@cache
def _is_there(data: str) -> bool:
    words = [sys.executable, "-m", "lightning_fcl.cli.main", "data", "check", data]
    return subprocess.run(words, capture_output=True, cwd=ROOT).returncode == 0


def _paper(name: str, row: str, seeds: int = 2) -> Work:
    words = ("reproduce", name, "--scale", "smoke", "--rows", row, "--seeds", str(seeds), "--workers", "2")
    return Work(name, words)


PAPERS = {
    _paper("flwf", "FLwF-2T/FT + ex"): ("ucihar",),
    _paper("flwf-as-written", "FLwF-2T/FT + ex"): ("ucihar",),
    _paper("incfed", "WESAD 25 % FedAvg"): ("wesad",),
    _paper("fedclip", "WESAD 25 % FedIP"): ("wesad",),
    _paper("fedclip-hhar", "25 % FedIP sigma 0.1 over 5 rounds", 1): ("hhar",),
    _paper("fedvit", "FedViT"): ("tinyimagenet",),
    _paper("odfcl", "ODFCL"): ("lfw", "orl"),
}


def whole(campaign: Campaign, work: Work) -> tuple[dict[str, object], float]:
    """Return the results and the run time in seconds of an uninterrupted command."""

    def run(folder: Path) -> None:
        ended = Command(folder, work.first()).end()
        if problem := ended.wrong(work.name, {0}):
            raise RuntimeError(f"{problem.kind}: {problem.said}")
        (folder / "seconds").write_text(str(ended.seconds))

    folder = campaign.once(work.name, run)
    return comes_to(folder), float((folder / "seconds").read_text())


def kill(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Send a signal to a command at a random time, unless the command has already ended. Start the command again."""
    work = rng.choice(works(campaign.folder))
    number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    _, seconds = whole(campaign, work)
    after = rng.uniform(0, 1.05 * seconds)
    what = f"{work.name}, {number.name} after {after:.2f} s"
    ended = Command(folder, work.first()).end(after, number)
    # A signal before the command installs its handlers ends the command with exit code -number.
    codes = {0, -number} | ({128 + number} if number != signal.SIGKILL else set())
    return ended.wrong(what, codes) or _goes_on(campaign, work, folder, what)


def fill(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """Run a command with a random limit of file size, as on a full disk, and start it again without the limit."""
    work = rng.choice(works(campaign.folder))
    whole(campaign, work)
    largest = int(10 ** rng.uniform(1, 5.3))
    what = f"{work.name}, files limited to {largest} bytes"
    ended = Command(folder, work.first(), largest).end()
    return ended.wrong(what, {0, 2}) or _goes_on(campaign, work, folder, what)


def _goes_on(campaign: Campaign, work: Work, folder: Path, what: str) -> Outcome:
    ended = Command(folder, work.again(folder)).end()
    if problem := ended.wrong(f"{what}; then again", {0}):
        return problem
    if left := leftovers(folder):
        return Outcome("left-over", what, ", ".join(left))
    expected, _ = whole(campaign, work)
    return same(expected, comes_to(folder), what)


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files and folders that the command did not delete."""
    return [str(p) for p in folder.rglob("*") if p.name.endswith((".tmp", ".lock")) or p.parent == folder / "tmp"]
