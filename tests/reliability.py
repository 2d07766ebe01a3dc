"""What a run survives: commands are killed and disks filled at random moments, and each is then brought to its end.

    python tests/reliability.py --seed 7 --cases kills=100 disks=10 --minutes 60 --write docs/reliability.md

A case is a function of the campaign, a random generator and an empty folder that gives an `Outcome`; to add one, write
it and name it in `CASES` with its usual number. Its seed is the campaign's, the case's name and its number, so any one
can be repeated: `--cases kills=1 --first 17`. Exit 1: some outcome is not fine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml

from lightning_fcl.cli.reproduce import recipes_folder
from lightning_fcl.evaluation.results import is_whole, read_results

ROOT = Path(__file__).parents[1]
KINDS = ("fine", "raw traceback", "silent difference", "hang", "orphan", "left-over", "wrong ending")
PATIENCE = 300  # seconds after which a command hangs
MARK = "LIGHTNING_FCL_RELIABILITY"  # in the environment of every process that a case starts


@dataclass(frozen=True)
class Outcome:
    """How a case came out.

    Args:
        kind: One of `KINDS`.
        what: What was done.
        said: What the command said, where that is not fine.
    """

    kind: str
    what: str
    said: str = ""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str
    seconds: float
    hung: bool
    orphans: list[int]

    def wrong(self, what: str, codes: set[int]) -> Outcome | None:
        """What is wrong with it; None: nothing."""
        for kind, is_so in (
            ("hang", self.hung),
            ("raw traceback", "Traceback (most recent call last)" in self.said or "Exception ignored" in self.said),
            ("orphan", bool(self.orphans)),
            ("wrong ending", self.code not in codes),
        ):
            if is_so:
                return Outcome(kind, what, f"exit {self.code}\n{self.said[-2000:]}")
        return None


class Command:
    """A command of ours in a folder, as a process of its own with a session of its own."""

    def __init__(self, folder: Path, words: list[str], largest_file: int | None = None) -> None:
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        more = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", MARK: self.mark}

        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

        self.said = (folder / "said.txt").open("w+")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_fcl.cli.main", *words],
            cwd=folder,
            env={**os.environ, **more},
            stdout=self.said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limit,  # this process has no threads
        )

    def end(self, after: float | None = None, number: int = signal.SIGKILL) -> Ended:
        """Wait for its end; after some seconds with a signal."""
        if after is not None:
            try:
                self.process.wait(after)
            except subprocess.TimeoutExpired:
                if number == signal.SIGINT:
                    os.killpg(self.process.pid, number)  # as a terminal does
                else:
                    self.process.send_signal(number)
        hung = False
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            hung = True
            self.process.kill()
            self.process.wait()
        seconds = time.monotonic() - self.began
        orphans = self._orphans()
        self.said.seek(0)
        text = self.said.read()
        self.said.close()
        return Ended(self.process.returncode, text, seconds, hung, orphans)

    def _orphans(self) -> list[int]:
        """The processes of this command that are still there five seconds after it; they are killed."""
        until = time.monotonic() + 5
        while (left := self._alive()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def _alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if mine and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is another user's
        return found


@dataclass(frozen=True)
class Work:
    """A command that is killed and goes on.

    Args:
        name: Its family.
        words: Its words, without ``--out``.
        fit: Whether it goes on from its folder's newest checkpoint, where other commands find that by themselves.
    """

    name: str
    words: tuple[str, ...]
    fit: bool = False

    def first(self) -> list[str]:
        """The words at first."""
        return [*self.words, "--out", "out"]

    def again(self, folder: Path) -> list[str]:
        """The words with which it goes on: a fit from its newest checkpoint, all others as before."""
        found = sorted((folder / "out" / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        return [*self.first(), *(["--ckpt_path", str(found[-1])] if self.fit and found else [])]


def small_recipe(folder: Path) -> list[str]:
    """The words that name a quickstart of a few seconds."""
    content = {
        "trainer": {"max_epochs": 4, "enable_progress_bar": False, "strategy": {"init_args": {"local_epochs": 1}}},
        "data": {
            "scenario": {"init_args": {"experiences": 2, "rounds_per_experience": 2}},
            "partition": {"class_path": "IID", "init_args": {"clients": 3}},
            "split": {"validation": 0.2},
        },
    }
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump(content))
    return [str(recipes_folder() / "quickstart.yaml"), str(small)]


def works(folder: Path) -> list[Work]:
    """What is killed: the quickstart as a fit, with a store on disk, as a search; the papers whose data is there."""
    recipes = small_recipe(folder)
    words = tuple(word for recipe in recipes for word in ("--config", recipe))
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


def _is_there(data: str) -> bool:
    words = [sys.executable, "-m", "lightning_fcl.cli.main", "data", "check", data]
    return subprocess.run(words, capture_output=True, cwd=ROOT).returncode == 0


def _paper(name: str, rows: str) -> Work:
    return Work(name, ("reproduce", name, "--scale", "smoke", "--rows", rows, "--seeds", "2", "--workers", "2"))


PAPERS = {
    _paper("flwf", "FLwF-2T/FT + ex"): ("ucihar",),
    _paper("flwf-as-written", "FLwF-2T/FT + ex"): ("ucihar",),
}


class Campaign:
    """What cases share: the works, and how each comes out if nothing happens, run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.works = works(folder)
        self._whole: dict[str, tuple[dict[str, object], float]] = {}

    def whole(self, work: Work) -> tuple[dict[str, object], float]:
        """What a work comes to, and the seconds that it takes."""
        if work.name not in self._whole:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            ended = Command(folder, work.first()).end()
            if problem := ended.wrong(work.name, {0}):
                raise RuntimeError(f"{problem.kind}: {problem.said}")
            self._whole[work.name] = (comes_to(folder), ended.seconds)
        return self._whole[work.name]

    def kill(self, rng: random.Random, folder: Path) -> Outcome:
        """A command gets a signal at a random moment, and goes on."""
        work = rng.choice(self.works)
        number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        _, seconds = self.whole(work)
        after = rng.uniform(0, 1.05 * seconds)
        what = f"{work.name}, {number.name} after {after:.2f} s"
        ended = Command(folder, work.first()).end(after, number)
        # In its first moments, before it listens, a command ends as any process does.
        codes = {0, -number} | ({128 + number} if number != signal.SIGKILL else set())
        return ended.wrong(what, codes) or self._goes_on(work, folder, what)

    def fill(self, rng: random.Random, folder: Path) -> Outcome:
        """No file may grow beyond a random size: what a full disk is to whoever writes. Then there is room again."""
        work = rng.choice(self.works)
        self.whole(work)
        largest = int(10 ** rng.uniform(1, 5.3))
        what = f"{work.name}, no room for files of more than {largest} bytes"
        ended = Command(folder, work.first(), largest).end()
        return ended.wrong(what, {0, 2}) or self._goes_on(work, folder, what)

    def _goes_on(self, work: Work, folder: Path, what: str) -> Outcome:
        ended = Command(folder, work.again(folder)).end()
        if problem := ended.wrong(f"{what}; then again", {0}):
            return problem
        if left := leftovers(folder):
            return Outcome("left-over", what, ", ".join(left))
        expected, _ = self.whole(work)
        if (now := comes_to(folder)) != expected:
            other = [name for name in {**expected, **now} if expected.get(name) != now.get(name)]
            return Outcome("silent difference", what, ", ".join(other))
        return Outcome("fine", what)


def comes_to(folder: Path) -> dict[str, object]:
    """What a command's folder holds at its end: each run's numbers, and the names of all that is there."""
    out = folder / "out"
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.name == "results.json":
            results = read_results(path.parent)
            rounds = [{k: v for k, v in entry.items() if k != "seconds"} for entry in results["record"]["rounds"]]
            found[name] = [results["metrics"], rounds, is_whole(path.parent)]
        elif path.name in ("metrics.csv", "trials.csv", "table.json", "best.yaml"):
            found[name] = path.read_text()
        elif path.suffix in (".md", ".png"):
            found[name] = path.stat().st_size > 0
    return json.loads(json.dumps(found))


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders that should have gone."""
    return [str(p) for p in folder.rglob("*") if p.name.endswith((".tmp", ".lock")) or p.parent == folder / "tmp"]


CASES: dict[str, tuple[Callable[[Campaign, random.Random, Path], Outcome], int]] = {
    "kills": (Campaign.kill, 100),
    "disks": (Campaign.fill, 10),
}


def report(seed: int, outcomes: dict[str, list[Outcome]]) -> str:
    """The campaign as a Markdown page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    counts = {name: Counter(outcome.kind for outcome in of) for name, of in outcomes.items()}
    words = " ".join(f"{name}={len(of)}" for name, of in outcomes.items())
    lines = [
        "# Reliability\n",
        "What happened to commands that were killed, or whose disk was full, at random moments. Each was then brought",
        "to its end, and compared with one to which nothing had happened. Written by\n",
        f"    make test-campaign ARGS='--seed {seed} --cases {words}'\n",
        f"on {date.today()}, commit {commit.strip()}.\n",
        f"| what | cases | {' | '.join(KINDS)} |",
        f"| --- | ---: | {' | '.join('---:' for _ in KINDS)} |",
        *(f"| {n} | {len(of)} | {' | '.join(str(counts[n][k]) for k in KINDS)} |" for n, of in outcomes.items()),
    ]
    wrong = [f"- {n}: {o.kind}: {o.what}" for n, of in outcomes.items() for o in of if o.kind != "fine"]
    return "\n".join([*lines, *(["\n## What went wrong\n", *wrong] if wrong else [])]) + "\n"


def main() -> None:
    """Run a campaign and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", nargs="+", default=[f"{name}={number}" for name, (_, number) in CASES.items()])
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--minutes", type=float, default=600, help="no case begins after so many")
    parser.add_argument("--write", type=Path, help="where the page is written")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    until = time.monotonic() + 60 * options.minutes
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="reliability-") as scratch:
        campaign = Campaign(Path(scratch))
        wanted = [(name, int(number)) for name, number in (case.split("=") for case in options.cases)]
        for name, number in wanted:
            outcomes[name] = []
            for index in range(options.first, options.first + number):
                if time.monotonic() > until:
                    break
                folder = Path(scratch) / f"{name}-{index}"
                folder.mkdir()
                outcome = CASES[name][0](campaign, random.Random(f"{options.seed} {name} {index}"), folder)
                outcomes[name].append(outcome)
                print(f"{name} {index}: {outcome.kind}: {outcome.what}\n{outcome.said}".rstrip(), flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    page = report(options.seed, outcomes)
    print(page)
    if options.write is not None:
        options.write.write_text(page)
    sys.exit(any(outcome.kind != "fine" for of in outcomes.values() for outcome in of))


if __name__ == "__main__":
    main()
