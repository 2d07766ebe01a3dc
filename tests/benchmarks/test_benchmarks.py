"""Benchmarks run, and measure the same thing on both sides: at sizes that say nothing about speed."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUNS = {
    "round_overhead": (["--quick"], ["100 x 15 digits", "bare vmap", "1,000 x 15, one batch"]),
    "any_module": (["--quick"], ["plain", "batch norm", "dropout", "dict batches", "4 to 26 digits"]),
    "run": (
        [
            "--quick",
            "--repeats",
            "1",
            "--out",
            ".",
            "--workloads",
            "digits-100",
            "drawn-1000",
            "--engines",
            "ours",
            "loop",
            "loop-two",
        ],
        ["| 100 clients x 15 digits, MLP 64-32-10 | loop, two processes |"],
    ),
    "round_memory": (["--clients", "2"], ["mean of 2 clients"]),
    "projection": (["--quick"], ["project on 10", "wasserstein"]),
    "level_with_avalanche": (["--quick", "--out", "."], ["| split digits | A-GEM |", "| permuted digits | Replay |"]),
    "attention_step": (["--networks", "pvt", "--repeats", "1"], ["| pvt |"]),
    "fedvit_step": (["--quick"], ["step with 10 past tasks", "projection"]),
    "reservoir": (["--help"], ["--quick"]),  # its smallest run takes most of a minute
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs(name, tmp_path):
    if name == "reservoir":
        pytest.importorskip("reservoirpy")
    options, expected = RUNS[name]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    for text in expected:
        assert text in result.stdout


def test_every_benchmark_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(RUNS)
