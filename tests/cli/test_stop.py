"""Tests of commands that are killed or receive a signal. Most tests start real processes."""

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

from lightning_fcl.cli.jobs import Job, is_finished, run_jobs
from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.runs.paper_rows import recipes_folder
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.runs.signals import stop

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.processes

CALLBACKS = '''
import os
import signal
from lightning.pytorch.callbacks import Callback
from lightning_fcl.evaluation import results

class Sends(Callback):
    """Send signals to this process in the middle of a round."""

    def __init__(self, signals: str, round: int = 1):
        self.signals, self.round = signals.split(), round

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.round and batch_idx == 3:
            self.round = None  # Send the signals only for the first client of the round that has four batches.
            for name in self.signals:
                os.kill(os.getpid(), signal.Signals[name])

class Waits(Callback):
    """Write the process ID to a pipe in the middle of a round, and wait forever."""

    def __init__(self, pipe: str):
        self.pipe = pipe

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1:
            with open(self.pipe, "w") as pipe:
                pipe.write(f"{os.getpid()}\\n")
            signal.sigwait([signal.SIGUSR1])

class DiesInReport(Callback):
    """Kill this process while the report is written."""

    def __init__(self):
        whole = results.write_atomic

        def die(path, content):
            if path.name != "report.html":
                return whole(path, content)
            path.with_name(f".{path.name}.tmp").write_text(content[:1000])
            os.kill(os.getpid(), signal.SIGKILL)

        results.write_atomic = die
'''


@pytest.fixture
def recipe(tmp_path, small_recipe):
    """Return a function that writes a small recipe of four rounds, and returns the files of the recipe.

    The function can add a callback to the recipe.
    """
    (tmp_path / "for_a_test.py").write_text(CALLBACKS)

    def write(callback=None, **trainer):
        content = small_recipe(rounds=4, clients=3, rounds_per_experience=2)
        content["trainer"] |= trainer
        quickstart = yaml.safe_load((recipes_folder() / "quickstart.yaml").read_text())
        kept = quickstart["trainer"]["callbacks"]
        content["trainer"]["callbacks"] = [*kept, callback] if callback else kept
        path = tmp_path / f"recipe-{len(list(tmp_path.glob('recipe-*')))}.yaml"
        path.write_text(yaml.safe_dump(content))
        return recipes_folder() / "quickstart.yaml", path

    return write


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command, or Python code, in a new process."""
    (tmp_path / "tmp").mkdir()
    started = []

    def run(words, code="from lightning_fcl.cli.main import main; main()"):
        path = f"{ROOT}{os.pathsep}{tmp_path}"
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # Handle signals as in a terminal. A shell's background processes ignore Ctrl-C, and `nohup` ignores SIGHUP.
        # Child processes inherit these settings.
        heard = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        )
        command = [sys.executable, "-c", heard + code, *map(str, words)]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def fit_words(files, out):
    return ["fit", *(word for file in files for word in ("--config", file)), "--out", out]


def temporary(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp") or path.parent.name == "tmp"]


def weights(out):
    newest = max(out.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)["state_dict"]


def same_run(left, right):
    """Return whether two runs have the same weights and the same record. Measured times are ignored."""
    records = [read_results(out)["record"]["rounds"] for out in (left, right)]
    for entry in (entry for rounds in records for entry in rounds):
        entry.pop("seconds", None)
        entry.pop("processor_seconds", None)
    states = weights(left), weights(right)
    return records[0] == records[1] and all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_fit_signal_stops_after_round_and_resumes_identically(recipe, start, tmp_path, monkeypatch, name):
    sends = {"class_path": "for_a_test.Sends", "init_args": {"signals": name}}
    own = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_epochs": 4}}
    files = recipe(sends, min_epochs=4)
    if name == "SIGTERM":  # With this callback, no checkpoint is due in the interrupted round.
        content = yaml.safe_load(files[1].read_text())
        content["trainer"]["callbacks"].append(own)
        files[1].write_text(yaml.safe_dump(content))
    process = start(fit_words(files, "out"))
    _, said = process.communicate(timeout=900)
    assert process.returncode == 128 + signal.Signals[name], said
    assert "stopping after this round, 2 of 4" in said and "stopped after round 2 of 4" in said
    assert "Traceback" not in said
    out = tmp_path / "out"
    results = read_results(out)
    assert not results["finished"] and [entry["round"] for entry in results["record"]["rounds"]] == [0, 1]
    page = (out / "report.html").read_text()
    assert "2 rounds, 3 clients" in page and "The run was stopped before its end" in page
    assert not (out / "files.txt").exists() and not temporary(tmp_path)
    # The interrupted fit was a separate process. The resumed fit and the reference fit run in this process.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main(shlex.split(re.search("Resume with: lightning-fcl (.*)", said)[1]))
    sends["init_args"]["round"] = 9
    main([str(word) for word in fit_words(recipe(sends), "whole")])
    assert read_results(out)["finished"] and same_run(out, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "code"), [("SIGINT SIGINT", 130), pytest.param("SIGINT SIGTERM", 143, marks=pytest.mark.long)]
)
def test_fit_second_signal_stops_at_once(recipe, start, tmp_path, names, code):
    files = recipe({"class_path": "for_a_test.Sends", "init_args": {"signals": names}}, logger=False)
    process = start(fit_words(files, "out"))
    _, said = process.communicate(timeout=900)
    assert process.returncode == code, said
    assert "Traceback" not in said and said.count("stopped.") == 1
    out = tmp_path / "out"
    assert not (out / "results.json").exists() and not temporary(tmp_path)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["last.ckpt"]


def side_by_side(recipe, start, tmp_path, workers=2):
    """Start a command that trains runs in two worker processes.

    Wait until ``workers`` worker processes are in the middle of a round. Return the process of the command, and a list
    of process descriptors (pidfd), one per worker, in the order in which the workers were started.
    """
    os.mkfifo(tmp_path / "pipe")
    files = recipe({"class_path": "for_a_test.Waits", "init_args": {"pipe": str(tmp_path / "pipe")}}, logger=False)
    code = (
        "import sys; from pathlib import Path; from lightning_fcl.cli import data, main\n"
        "from lightning_fcl.cli.jobs import Job, run_jobs\nfrom lightning_fcl.runs.recipe import Recipe\n"
        "files = tuple(map(Path, sys.argv[2:]))\n"
        "jobs = [Job(f'run {n}', Recipe(files), n, Path(f'run-{n}')) for n in range(3)]\n"
        "data.Data.run = lambda self, options: run_jobs(jobs, 2)\n"
        "main.main(['data', 'ls'])\n"
    )
    parent = start(["data", *files], code)
    watched = {}
    with open(tmp_path / "pipe", "r+b", buffering=0) as pipe:  # Opening a pipe for reading and writing does not block.
        while len(watched) < workers:  # Each worker writes its process ID as one line.
            assert select.select([pipe], [], [], 240)[0] and parent.poll() is None
            watched |= {int(line): os.pidfd_open(int(line)) for line in pipe.read(4096).split()}
    return parent, [watched[process_id] for process_id in sorted(watched)]


def all_gone(watched):
    """Return whether all processes end. The wait stops if no process ends for 60 s."""
    left = set(watched)
    while left and (ended := select.select(left, [], [], 60)[0]):
        left -= set(ended)
    for descriptor in watched:
        os.close(descriptor)
    return not left


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SIGKILL", *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGINT", "SIGHUP"))]
)
def test_run_jobs_workers_end_with_parent(recipe, start, tmp_path, name):
    parent, watched = side_by_side(recipe, start, tmp_path)
    parent.send_signal(signal.Signals[name])
    _, said = parent.communicate(timeout=900)
    assert all_gone(watched)
    assert "Traceback" not in said
    if name == "SIGKILL":
        assert parent.returncode == -signal.SIGKILL
        # The next command deletes the temporary files of a killed command.
        start(["data", "ls"]).communicate(timeout=900)
    else:
        assert parent.returncode == 128 + signal.Signals[name], said
        assert "Finished: 0 of 3 runs. Run the same command again" in said
    assert not temporary(tmp_path)


@pytest.mark.slow
def test_run_jobs_killed_worker_is_reported_and_others_end(recipe, start, tmp_path):
    parent, watched = side_by_side(recipe, start, tmp_path)
    signal.pidfd_send_signal(watched[-1], signal.SIGKILL)
    _, said = parent.communicate(timeout=300)  # The other worker would wait forever.
    assert all_gone(watched)
    assert parent.returncode == 2
    assert "Expected all workers to finish their runs, but a worker was killed" in said and "Traceback" not in said


WORKER_TASK = """
import os
import signal
import time

def die_in_newest_worker(folder):
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(.02)
    time.sleep(.2)
    if os.getpid() == max(int(path.name) for path in folder.iterdir()):
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.slow
def test_run_parallel_notices_that_newest_worker_was_killed(start, tmp_path):
    (tmp_path / "worker_task.py").write_text(WORKER_TASK)
    code = (
        "import sys; from pathlib import Path; from worker_task import die_in_newest_worker\n"
        "from lightning_fcl.cli.jobs import run_parallel\nfrom lightning_fcl.errors import InvalidStateError\n"
        "for folder in map(Path, sys.argv[1:]):\n"
        "    try:\n        list(run_parallel(die_in_newest_worker, [folder] * 4, 4))\n"
        "    except InvalidStateError as error:\n        print(error)\n"
    )
    folders = [tmp_path / f"processes-{n}" for n in range(3)]
    for folder in folders:
        folder.mkdir()
    said, errors = start(folders, code).communicate(timeout=300)  # Otherwise, the other workers would wait forever.
    assert said.count("but a worker was killed") == 3, errors


@pytest.mark.slow
@pytest.mark.long
def test_run_jobs_completes_run_killed_during_report(recipe, start, tmp_path, reports, capsys):
    files = recipe({"class_path": "for_a_test.DiesInReport"}, logger=False)
    job = Job("a run", Recipe(tuple(files)), 0, tmp_path / "out")
    process = start(
        ["--ignored", *files],
        f"""
import sys; from pathlib import Path; from lightning_fcl.cli.jobs import Job, run_job
from lightning_fcl.runs.recipe import Recipe
run_job(Job("a run", Recipe(tuple(map(Path, sys.argv[2:]))), 0, Path({str(job.out)!r})))
""",
    )
    _, said = process.communicate(timeout=900)
    assert process.returncode == -signal.SIGKILL, said
    assert (job.out / "results.json").exists() and not (job.out / "report.html").exists()
    assert not is_finished(job)
    before = (job.out / "results.json").read_bytes()
    run_jobs([job], 1)
    assert is_finished(job) and not temporary(job.out)
    assert (job.out / "results.json").read_bytes() == before  # The run was not trained again.
    assert "</html>" in (job.out / "report.html").read_text()


@pytest.mark.slow
def test_run_jobs_rewrites_damaged_files(recipe, tmp_path, reports):
    job = Job("a run", Recipe(tuple(recipe(logger=False))), 0, tmp_path / "out")
    run_jobs([job], 1)
    whole = {path.name: path.read_bytes() for path in job.out.iterdir() if path.is_file()}
    assert is_finished(job) and {"metrics.csv", "report.html", "files.txt"} <= set(whole)
    for name in ("metrics.csv", "report.html", "files.txt", "results.json"):
        damaged = bytearray(whole[name])
        damaged[len(damaged) // 2] ^= 1
        for content in (damaged, whole[name][: len(damaged) // 2], None) if name != "results.json" else [damaged]:
            (job.out / name).unlink()
            if content is not None:
                (job.out / name).write_bytes(content)
            assert not is_finished(job)
            run_jobs([job], 1)
            assert is_finished(job)
            if name != "results.json":  # results.json contains the measured time.
                assert {file: (job.out / file).read_bytes() for file in whole} == whole
    assert json.loads(whole["results.json"])["metrics"] == read_results(job.out)["metrics"]


def test_thread_oserror_prints_one_line(capfd):
    def fail(error):
        raise error

    before = threading.excepthook
    with stop.installed():
        for error in (OSError(28, "No space left on device"), KeyError("a fault")):
            thread = threading.Thread(target=fail, args=[error])
            thread.start()
            thread.join()
    assert threading.excepthook is before
    said = capfd.readouterr().err
    assert "lightning-fcl: error: [Errno 28] No space left on device" in said
    assert said.count("Traceback") == 1 and "KeyError: 'a fault'" in said
