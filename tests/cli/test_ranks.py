"""`fit` on several processes, as the command line starts them: killed, told to stop, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_fcl.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FIT = [sys.executable, "-m", "lightning_fcl", "fit", "quickstart", "--trainer.enable_progress_bar", "false"]
SMALL = ["--trainer.strategy.max_vectorized_clients", "2", "--trainer.accelerator", "cpu"]


def words(out, devices, *more):
    return [*FIT, *SMALL, "--trainer.devices", str(devices), "--out", str(out), *more]


def results(out):
    """What a run came to, without what a clock says."""
    found = json.loads((out / "results.json").read_text())
    for entry in found["record"]["rounds"]:
        entry.pop("seconds")
    return found["metrics"], found["record"]


def children(process):
    """Numbers of the processes that a process has started."""
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(number) for path in lists for number in path.read_text().split()]


def gone(number):
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(condition, seconds=900):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def alone(out, capsys, *more):
    """The same in this process; what it says, without where its files are, and what it comes to."""
    capsys.readouterr()
    main([*words(out, 1, *more)[3:]])
    return capsys.readouterr().out.replace(str(out), ""), results(out)


@pytest.mark.long
def test_two_processes_come_to_the_same(tmp_path, capsys):
    """Only the first one speaks."""
    short = ("--trainer.max_epochs", "3")
    run = subprocess.run(words(tmp_path / "2", 2, *short), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (run.stdout.replace(str(tmp_path / "2"), ""), results(tmp_path / "2")) == alone(
        tmp_path / "1", capsys, *short
    )


@pytest.mark.parametrize("victim", [pytest.param("the first", marks=pytest.mark.long), "another"])
def test_a_process_is_killed(tmp_path, capsys, victim):
    """The others end with a clear message and leave a whole checkpoint, from which any number of them goes on."""
    running = subprocess.Popen(words(tmp_path / "cut", 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list((tmp_path / "cut").glob("checkpoints/*.ckpt"))) or running.poll() is not None)
    others = children(running)
    os.kill(running.pid if victim == "the first" else others[0], signal.SIGKILL)
    _, said = running.communicate(timeout=900)
    assert running.returncode != 0
    if victim == "another":
        assert "one process has exited" in said or "told to stop" in said or "Child process" in said, said
    wait_until(lambda: all(map(gone, others)))
    goes_on = [*FIT[:4], str(tmp_path / "cut"), "--trainer.devices", "3" if victim == "another" else "1"]
    subprocess.run(goes_on, check=True, capture_output=True)
    assert results(tmp_path / "cut")[0] == alone(tmp_path / "whole", capsys)[1][0]


def test_ctrl_c_ends_after_the_round(tmp_path):
    """SIGTERM comes to the first process alone; both end after the round, with a checkpoint."""
    running = subprocess.Popen(words(tmp_path, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("checkpoints/*.ckpt"))) or running.poll() is not None)
    others = children(running)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=900)
    assert running.returncode == 128 + signal.SIGTERM, said
    assert "Resume with: lightning-fcl fit" in said
    wait_until(lambda: all(map(gone, others)))


def test_too_many_processes(tmp_path):
    run = subprocess.run(
        words(tmp_path, 3, "--trainer.strategy.max_vectorized_clients", "5"), capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "the number of client groups in a round, 2 (of up to 5 clients), but got 3" in run.stderr


def test_torchrun(tmp_path, capsys):
    """Processes that somebody else has started."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *FIT[2:], *SMALL]
    more = ["--trainer.devices", "2", "--trainer.max_epochs", "3", "--out", str(tmp_path / "2")]
    run = subprocess.run([*launch, *more], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert results(tmp_path / "2") == alone(tmp_path / "1", capsys, "--trainer.max_epochs", "3")[1]
