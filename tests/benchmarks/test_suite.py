"""Tests that the suite's engines give equal results, and that its tables contain the measurements."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENTS = FOLDER.parent / "runs" / "benchmarks"


@pytest.fixture(autouse=True)
def suite(monkeypatch):
    """Import the suite from its folder, because it is not part of the package."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("suite")


def trained(workload, engine, rounds, folder):
    """Train a workload with an engine. Return the last state of the server, and the measurements of the engine."""
    from safetensors.torch import load_file
    from suite.marks import Marks

    name = engine.__name__.rpartition(".")[2]
    marks = folder / f"{name}.marks"
    engine.run(workload, rounds, Marks(marks, os.getpid(), rounds), folder / name)
    return load_file(folder / name), [json.loads(line) for line in marks.read_text().splitlines()]


@pytest.mark.parametrize("name", ["digits-100", "har-uneven", "esn", "vit"])
def test_trainer_engine_equals_loop(name, tmp_path):
    from suite import workloads
    from suite.engines import loop, ours
    from suite.measuring import difference, summarize_marks

    workload = workloads.make(name, quick=True)
    expected, _ = trained(workload, loop, 3, tmp_path)
    start = workload.initial()
    # Three rounds change the state. Otherwise the comparison below would always pass.
    assert difference(start, expected) > 1e-3
    actual, lines = trained(workload, ours, 3, tmp_path)
    assert difference(expected, actual) < 1e-4
    shorter, _ = trained(workload, loop, 2, tmp_path)
    assert difference(expected, shorter) > 10 * difference(expected, actual)
    assert [line["name"] for line in lines] == ["planning", "planned", "begin", "first", "last"]
    result = summarize_marks([{"name": "data", "time": lines[0]["time"]}, *lines], rounds=3)
    assert result["start"] == pytest.approx(result["setup"] + result["first"], abs=1e-6)
    assert 0 < result["round"] < lines[-1]["time"] - lines[0]["time"]


@pytest.mark.parametrize("name", ["har-uneven", "esn"])
def test_two_process_engine_equals_loop(name, tmp_path):
    from suite import workloads
    from suite.engines import loop, processes
    from suite.measuring import difference

    workload = workloads.make(name, quick=True)
    (expected, _), (actual, _) = (trained(workload, engine, 2, tmp_path) for engine in (loop, processes))
    assert difference(expected, actual) < 1e-4


def test_workload_with_client_sampling_trains(tmp_path):
    from suite import workloads
    from suite.engines import ours, pfl_research

    workload = workloads.make("drawn-1000", quick=True)
    assert workload.drawn == 4 < workload.clients
    assert pfl_research.refuses(workload) == "does not support client sampling"
    trained(workload, ours, 2, tmp_path)


def test_cpu_seconds_and_memory_include_child_processes():
    from suite.marks import cpu_seconds, high_water, memory, processes

    work = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = f"{work}\nprint('done', flush=True); input()"
    before = cpu_seconds(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"done\n"
        assert process.pid in processes(os.getpid())
        assert 0.25 < cpu_seconds(process.pid) <= cpu_seconds(os.getpid()) - before + 0.1
        assert 1 < memory(process.pid) <= high_water(process.pid)
    finally:
        process.communicate(b"\n")
    # The processor time of a child process is still part of the sum after the child has ended.
    assert memory(process.pid) == 0 and cpu_seconds(os.getpid()) - before > 0.25


def test_report_tables_and_plot_show_measurements(tmp_path):
    from suite import report

    def run(seconds, **more):
        return {"round": seconds, "cpu": seconds, "start": 2.0, "memory": 100.0, "differs": None, **more}

    machine = {"gpu": None, "cores": 2, "processor": "CPU", "torch": "2"}
    engines = {
        "loop": [run(0.2), run(0.4)],
        "ours": [run(0.1, differs=1e-7), run(0.1, differs=2e-7)],
        "loop-two": [run(0.1), run(0.2)],
        "pfl": [{"error": "refused: a | b"}],
    }
    drawn = {"ours": [run(0.01, setup=0.5, first=1.0, grown=7.0)]}
    for name, measured in {"har": engines, "drawn-1000": drawn}.items():
        content = {"workload": name, "quick": False, "machine": machine, "engines": measured}
        (tmp_path / f"suite-{name}.json").write_text(json.dumps(content))
    measurements = report.read(tmp_path)
    rows = report.table(measurements).splitlines()
    assert len(rows) == 6
    assert "| ours | 100.0 ms (100.0 to 100.0) | 0.38 (0.25 to 0.50) | 100.0 ms | 100 MiB | 2.00 s | 2e-07 |" in rows[3]
    assert "| loop, two processes |" in rows[4] and "0.50 (0.50 to 0.50)" in rows[4]
    assert "| pfl 0.6 | a / b |" in rows[5]
    assert (
        report.scale(measurements).splitlines()[2] == "| 1,000 | 0.50 s | 1.00 s | 10.0 ms | 100 MiB | 1.00 | 7 MiB |"
    )
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    report.fill(document, "a", "new")
    report.fill(document, "a", "newer\n")
    assert document.read_text() == "before\n<!-- a: begin -->\n\nnewer\n\n<!-- a: end -->\nafter\n"
    with pytest.raises(ValueError, match="`<!-- b: begin -->`"):
        report.fill(document, "b", "")
    report.plot(measurements, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").stat().st_size > 10_000


def test_documentation_pages_have_report_markers():
    for path, name in ((FOLDER / "README.md", "suite"), (FOLDER.parent / "docs" / "scale.md", "drawn")):
        assert path.read_text().count(f"<!-- {name}: ") == 2


@pytest.mark.slow
@pytest.mark.long
def test_run_command_engines_equal_loop(tmp_path, monkeypatch, capsys):
    words = ["--quick", "--repeats", "1", "--out", str(tmp_path), "--workloads", "digits-100"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--engines", "loop", "ours", "loop-two"])
    importlib.import_module("run").main()
    assert "| 100 clients x 15 digits, MLP 64-32-10 | loop, two processes |" in capsys.readouterr().out
    measured = json.loads((tmp_path / "suite-digits-100.json").read_text())["engines"]
    for engine in ("ours", "loop-two"):
        (measurement,) = measured[engine]
        assert measurement["differs"] < 1e-4 and measurement["round"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pfl", "flower"])
@pytest.mark.parametrize("name", ["digits-100", "har-uneven", "esn"])
def test_third_party_engine_equals_loop(name, engine):
    from suite.measuring import ENGINES, measured

    python = ENVIRONMENTS / f"env-{ENGINES[engine]}" / "bin" / "python"
    if not python.exists():
        pytest.skip("the environment is missing: run `python benchmarks/run.py --quick`")
    assert "error" not in measured(name, "loop", sys.executable, quick=True)
    start = time.monotonic()
    measurement = measured(name, engine, str(python), quick=True)
    if engine == "pfl" and name == "esn":
        assert measurement == {"error": "refused: supports only gradient-based training"}
        return
    assert measurement["differs"] < 1e-4 and 0 < measurement["round"] < time.monotonic() - start


@pytest.mark.slow
@pytest.mark.long
def test_measurement_processes_end_when_command_is_killed(tmp_path):
    from suite.marks import processes

    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--out", str(tmp_path), "--repeats", "50"]
    command += ["--workloads", "digits-100", "--engines", "loop-two"]
    measuring = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        started = set()
        # Wait for the process of the measurement and one of its child processes.
        while len(started) < 2 and time.monotonic() < end:
            time.sleep(0.2)
            started = processes(measuring.pid) - {measuring.pid}
    finally:
        measuring.kill()
        measuring.wait()
    assert len(started) >= 2
    while (remaining := [pid for pid in started if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    assert not remaining
