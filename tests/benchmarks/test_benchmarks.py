"""Tests that benchmarks run at a small size. For some slow benchmarks, the tests only print the help text."""

import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUNS = {
    "round_overhead": (["--quick"], ["100 x 15 digits", "bare vmap", "1,000 x 15, one batch"]),
    "any_module": (["--quick"], ["plain", "batch norm", "dropout", "dict batches", "4 to 26 digits"]),
    # tests/benchmarks/test_suite.py runs measurements with this script.
    "run": (["--help"], ["--repeats"]),
    "round_memory": (["--clients", "2"], ["mean of 2 clients"]),
    "projection": (["--quick"], ["project on 10", "wasserstein"]),
    "level_with_avalanche": (["--quick", "--out", "."], ["| split digits | A-GEM |", "| permuted digits | Replay |"]),
    "attention_step": (["--networks", "pvt", "--repeats", "1"], ["| pvt |"]),
    "fedvit_step": (["--quick"], ["step with 10 past tasks", "projection"]),
    "versions": (
        [str(FOLDER.parent), "--quick", "--repeats", "1", "--only", "EWC, participation 0.2"],
        ["ratio", "client state"],
    ),
    "durable_files": ([str(FOLDER.parent), "--pairs", "1", "--rounds", "1"], ["median"]),
    "what_lasts": (["--help"], ["--seeds"]),
    "privacy": (["--only", "ridge", "--seeds", "2"], ["one release", "| none |"]),
    # Even the smallest run takes almost a minute, so only `--help` runs.
    "reservoir": (["--help"], ["--quick"]),
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a script in this process, because a new process would spend most time on imports."""
    levels = {name: logging.getLogger(name).level for name in ("lightning", "lightning.pytorch", "lightning.fabric")}
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)

    def script(name, options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    yield script
    torch.set_num_threads(threads)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


LONG = ("round_overhead", "level_with_avalanche", "attention_step", "fedvit_step", "versions", "durable_files")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in RUNS])
def test_benchmark_script_prints_expected_text(name, run, capsys):
    if name == "reservoir":
        pytest.importorskip("reservoirpy")
    options, expected = RUNS[name]
    try:
        run(name, options)
    # `--help` raises SystemExit.
    except SystemExit as end:
        assert not end.code
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


def test_runs_contains_every_benchmark_script():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(RUNS)
