"""Tests of `fit` in several processes: equal results, killed processes, signals, and too many processes."""

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
    """Return the metrics and the record of a run. Measured times are removed."""
    found = json.loads((out / "results.json").read_text())
    for entry in found["record"]["rounds"]:
        entry.pop("seconds")
        entry.pop("processor_seconds")
    return found["metrics"], found["record"]


def children(process):
    """Return the IDs of the child processes of a process."""
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(number) for path in lists for number in path.read_text().split()]


def has_ended(number):
    """Return whether a process has ended."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(condition, seconds=900):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.1)


def alone(out, capsys, *more):
    """Fit in this process only. Return the printed output without paths, and the results."""
    capsys.readouterr()
    main([*words(out, 1, *more)[3:]])
    return capsys.readouterr().out.replace(str(out), ""), results(out)


@pytest.mark.long
def test_fit_two_processes_equal_one_process(tmp_path, capsys):
    """The results are equal, and the output is printed only once, by rank 0."""
    short = ("--trainer.max_epochs", "3")
    run = subprocess.run(words(tmp_path / "2", 2, *short), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (run.stdout.replace(str(tmp_path / "2"), ""), results(tmp_path / "2")) == alone(
        tmp_path / "1", capsys, *short
    )


@pytest.mark.parametrize("victim", [pytest.param("the first", marks=pytest.mark.long), "another"])
def test_fit_killed_process_leaves_resumable_checkpoint(tmp_path, capsys, victim):
    """If one process is killed, the other processes end, and any number of processes can resume from the checkpoint."""
    running = subprocess.Popen(words(tmp_path / "cut", 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list((tmp_path / "cut").glob("checkpoints/*.ckpt"))) or running.poll() is not None)
    others = children(running)
    os.kill(running.pid if victim == "the first" else others[0], signal.SIGKILL)
    _, said = running.communicate(timeout=900)
    assert running.returncode != 0
    if victim == "another":
        assert "Another process has probably exited" in said or "told to stop" in said or "Child process" in said, said
    wait_until(lambda: all(map(has_ended, others)))
    goes_on = [*FIT[:4], str(tmp_path / "cut"), "--trainer.devices", "3" if victim == "another" else "1"]
    subprocess.run(goes_on, check=True, capture_output=True)
    assert results(tmp_path / "cut")[0] == alone(tmp_path / "whole", capsys)[1][0]


def test_fit_sigterm_stops_all_processes_after_round(tmp_path):
    """Only rank 0 receives SIGTERM. Both processes end after the round, with a checkpoint."""
    running = subprocess.Popen(words(tmp_path, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("checkpoints/*.ckpt"))) or running.poll() is not None)
    others = children(running)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=900)
    assert running.returncode == 128 + signal.SIGTERM, said
    assert "Resume with: lightning-fcl fit" in said
    wait_until(lambda: all(map(has_ended, others)))


def test_fit_more_processes_than_client_groups_raises(tmp_path):
    run = subprocess.run(
        words(tmp_path, 3, "--trainer.strategy.max_vectorized_clients", "5"), capture_output=True, text=True
    )
    assert run.returncode == 2
    assert (
        "to be at most 2, the largest number of client groups in a round, but got 3. Each group has at most 5 clients."
        in run.stderr
    )


def test_fit_under_torchrun_equals_one_process(tmp_path, capsys):
    """The processes are started by torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *FIT[2:], *SMALL]
    more = ["--trainer.devices", "2", "--trainer.max_epochs", "3", "--out", str(tmp_path / "2")]
    run = subprocess.run([*launch, *more], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert results(tmp_path / "2") == alone(tmp_path / "1", capsys, "--trainer.max_epochs", "3")[1]
