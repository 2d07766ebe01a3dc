"""What the cases of a campaign share: commands as processes, how they come out, and what they come to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.results import is_complete, read_results
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.runs.paper_rows import recipes_folder

ROOT = Path(__file__).parents[2]
KINDS = ("fine", "raw traceback", "silent difference", "hang", "orphan", "left-over", "wrong ending")
PATIENCE = 300  # seconds after which a process hangs
CALL = 120  # and a command within this one
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
    """How a command ended; early: by a signal that came before it listened, when Python itself answers Ctrl-C."""

    code: int
    said: str
    seconds: float
    hung: bool
    orphans: list[int]
    early: bool

    def wrong(self, what: str, codes: set[int]) -> Outcome | None:
        """What is wrong with it; None: nothing."""
        raw = "Traceback (most recent call last)" in self.said or "Exception ignored" in self.said
        for kind, is_so in (
            ("hang", self.hung),
            ("raw traceback", raw and not self.early),
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
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a campaign in a shell's background ignores it
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_fcl.cli.main", *words],
            cwd=folder,
            env={**os.environ, **more},
            stdout=subprocess.PIPE,  # a file would be cut off where the disk is full
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limit,  # what it calls is safe beside threads
        )
        self.said = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            while piece := pipe.read1():
                self.said += piece

    def end(self, after: float | None = None, number: int = signal.SIGKILL) -> Ended:
        """Wait for its end; after some seconds with a signal."""
        early = False
        if after is not None:
            try:
                self.process.wait(after)
            except subprocess.TimeoutExpired:
                early = not self.listens()
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
        self._listener.join(5)  # orphans that could not be killed may hold the pipe
        return Ended(self.process.returncode, self.said.decode(errors="replace"), seconds, hung, orphans, early)

    def listens(self) -> bool:
        """Whether the process has a handler of its own for SIGTERM: only from `stop.listening` on."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

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
class Said:
    """How a command within this process ended: its exit code, and what it wrote to standard error."""

    code: int
    text: str

    def wrong(self, what: str) -> Outcome | None:
        """What is wrong with an end that is neither a good one nor one message; None: nothing."""
        if self.code == 0:
            return None
        if self.code != 2:
            kind = {-1: "raw traceback", -2: "hang"}.get(self.code, "wrong ending")
            return Outcome(kind, what, self.text[-2000:])
        fine = "error: " in self.text and "Traceback" not in self.text
        return None if fine else Outcome("wrong ending", what, self.text[-2000:])


def call(words: list[str], folder: Path) -> Said:
    """Run a command within this process: most cases end before anything is trained, and a process takes seconds."""
    here, text = Path.cwd(), io.StringIO()

    def ring(*_: object) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(CALL)
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
            main(words)
        return Said(0, text.getvalue())
    except SystemExit as stop:
        return Said(stop.code if isinstance(stop.code, int) else 1, text.getvalue())
    except TimeoutError:
        return Said(-2, text.getvalue())
    except Exception:
        return Said(-1, traceback.format_exc())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        os.chdir(here)


class Campaign:
    """What cases have made once, each in a folder of its own.

    Args:
        folder: Where these folders are.
        seed: The campaign's seed.
        numbers: How many cases of each name it has.
    """

    def __init__(self, folder: Path, seed: int, numbers: dict[str, int]) -> None:
        self.folder, self.seed, self.numbers = folder, seed, numbers
        self._made: dict[str, Path] = {}

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder that ``make`` has filled, the first time that it is asked for."""
        if name not in self._made:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            make(folder)
            self._made[name] = folder
        return self._made[name]


def small_recipe(folder: Path) -> list[str]:
    """The words that name a quickstart of a few seconds."""
    content = {
        "trainer": {"max_epochs": 4, "enable_progress_bar": False, "strategy": {"init_args": {"local_epochs": 1}}},
        "data": {
            "scenario": {"init_args": {"num_experiences": 2, "rounds_per_experience": 2}},
            "partition": {"class_path": "IID", "init_args": {"num_clients": 3}},
            "split": {"validation": 0.2},
        },
    }
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump(content))
    return [str(recipes_folder() / "quickstart.yaml"), str(small)]


def comes_to(folder: Path) -> dict[str, object]:
    """What a command's folder holds at its end: each run's numbers, and the names of all that is there."""
    out = folder / "out"
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.name == "results.json":
            results = read_results(path.parent)
            rounds = [{k: v for k, v in entry.items() if k != "seconds"} for entry in results["record"]["rounds"]]
            found[name] = [results["metrics"], rounds, is_complete(path.parent)]
        elif path.name == "table.json":
            found[name] = {
                row: {m: dict(cell.values) for m, cell in of.items()} for row, of in read_table(path).rows.items()
            }
        elif path.name in ("metrics.csv", "trials.csv", "best.yaml"):
            found[name] = path.read_text()
        elif path.suffix in (".md", ".png"):
            found[name] = path.stat().st_size > 0
    return json.loads(json.dumps(found))


def same(expected: dict[str, object], found: dict[str, object], what: str) -> Outcome:
    """Whether something came to what it would have come to."""
    other = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return Outcome("silent difference", what, ", ".join(other)) if other else Outcome("fine", what)
