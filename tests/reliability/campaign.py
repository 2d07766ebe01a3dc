"""Shared code of the fault-injection cases: run commands, describe outcomes, and compare the results of runs."""

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
PATIENCE = 300  # Number of seconds after which a process counts as hanging.
CALL = 120  # Number of seconds after which a command within this process counts as hanging.
MARK = "LIGHTNING_FCL_RELIABILITY"  # environment variable of each process that a case starts


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Args:
        kind: One of `KINDS`.
        what: The injected fault.
        said: Output of the command, or names of the affected files. Empty if the kind is "fine".
    """

    kind: str
    what: str
    said: str = ""


@dataclass(frozen=True)
class Ended:
    """The end of a command process.

    Args:
        code: Exit code.
        said: Standard output and standard error.
        seconds: Run time, in seconds.
        hung: Whether the process did not end within `PATIENCE` seconds.
        orphans: IDs of the processes that were still alive 5 seconds after the command ended.
        early: Whether `Command.end` sent its signal before the command installed its handlers. In this case, Python
            prints a traceback for Ctrl-C.
    """

    code: int
    said: str
    seconds: float
    hung: bool
    orphans: list[int]
    early: bool

    def wrong(self, what: str, codes: set[int]) -> Outcome | None:
        """Return the outcome if the process failed or its exit code is not in ``codes``, otherwise None.

        A process failed if it hung, printed a raw traceback, or left orphans. A traceback is accepted if `early` is
        true.
        """
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
    """A command of lightning-fcl that runs in a folder, as a separate process in a new session.

    Args:
        folder: Working directory.
        words: Arguments of the command.
        largest_file: Maximum file size in bytes, as on a full disk. Default: no limit.
    """

    def __init__(self, folder: Path, words: list[str], largest_file: int | None = None) -> None:
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        more = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", MARK: self.mark}

        def limit() -> None:
            # A background process of a shell ignores SIGINT, and child processes inherit this setting.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_fcl.cli.main", *words],
            cwd=folder,
            env={**os.environ, **more},
            stdout=subprocess.PIPE,  # `largest_file` would also limit the size of a log file.
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limit,  # `limit` makes only calls that are safe with threads.
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
        """Wait for the end of the process.

        If ``after`` is given and the process still runs after ``after`` seconds, send signal ``number``.
        """
        early = False
        if after is not None:
            try:
                self.process.wait(after)
            except subprocess.TimeoutExpired:
                early = not self.listens()
                if number == signal.SIGINT:
                    os.killpg(self.process.pid, number)  # A terminal sends Ctrl-C to the whole process group.
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
        self._listener.join(5)  # Orphans that cannot be killed may keep the pipe open.
        return Ended(self.process.returncode, self.said.decode(errors="replace"), seconds, hung, orphans, early)

    def listens(self) -> bool:
        """Return whether the process has installed its SIGTERM handler (by the library's `stop.installed`)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def _orphans(self) -> list[int]:
        """Kill the processes of this command that are alive 5 seconds after the command ended. Return their IDs."""
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
                continue  # The process has ended, or belongs to another user.
        return found


@dataclass(frozen=True)
class Said:
    """Exit code and output of a command that ran within this process.

    The text is the standard error. For an exception other than `SystemExit`, the code is -1 and the text is the
    traceback. For a timeout, the code is -2.
    """

    code: int
    text: str

    def wrong(self, what: str) -> Outcome | None:
        """Return None if the command succeeded or stopped with one error message, otherwise the outcome."""
        if self.code == 0:
            return None
        if self.code != 2:
            kind = {-1: "raw traceback", -2: "hang"}.get(self.code, "wrong ending")
            return Outcome(kind, what, self.text[-2000:])
        fine = "error: " in self.text and "Traceback" not in self.text
        return None if fine else Outcome("wrong ending", what, self.text[-2000:])


def call(words: list[str], folder: Path) -> Said:
    """Run a command within this process. Most cases end before training, and a new process would take seconds."""
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
    """Folders that several cases share. Each folder is made once.

    Args:
        folder: Folder that contains the shared folders.
        seed: Seed of the campaign.
        numbers: Number of cases for each case name.
    """

    def __init__(self, folder: Path, seed: int, numbers: dict[str, int]) -> None:
        self.folder, self.seed, self.numbers = folder, seed, numbers
        self._made: dict[str, Path] = {}

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder that ``make`` fills. ``make`` is called only for the first request of this name."""
        if name not in self._made:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            make(folder)
            self._made[name] = folder
        return self._made[name]


def small_recipe(folder: Path) -> list[str]:
    """Return the files of a quickstart recipe that trains in a few seconds."""
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
    """Return the comparable content of the results in the output folder of a command, by file.

    Run times are removed. For pages and figures, the content is whether the file is not empty.
    """
    out = folder / "out"
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.name == "results.json":
            results = read_results(path.parent)
            rounds = [
                {k: v for k, v in entry.items() if not k.endswith("seconds")} for entry in results["record"]["rounds"]
            ]
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
    """Compare the results, and return the outcome "fine" or "silent difference"."""
    other = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return Outcome("silent difference", what, ", ".join(other)) if other else Outcome("fine", what)
