"""The suite's engines do the same work, and its tables say what was measured."""

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
    """It is no part of the package."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("suite")


def trained(workload, engine, rounds, folder):
    """What an engine makes of a workload, and its marks."""
    from safetensors.torch import load_file
    from suite.marks import Marks

    name = engine.__name__.rpartition(".")[2]
    marks = folder / f"{name}.marks"
    engine.run(workload, rounds, Marks(marks, os.getpid(), rounds), folder / name)
    return load_file(folder / name), [json.loads(line) for line in marks.read_text().splitlines()]


@pytest.mark.parametrize("name", ["digits-100", "har-uneven", "esn", "vit"])
def test_our_trainer_does_what_the_loop_does(name, tmp_path):
    from suite import workloads
    from suite.engines import loop, ours
    from suite.measuring import difference, told

    workload = workloads.make(name, quick=True)
    expected, _ = trained(workload, loop, 3, tmp_path)
    start = workload.initial()
    assert difference(start, expected) > 1e-3  # three rounds change something
    found, lines = trained(workload, ours, 3, tmp_path)
    assert difference(expected, found) < 1e-4
    shorter, _ = trained(workload, loop, 2, tmp_path)
    assert difference(expected, shorter) > 10 * difference(expected, found)
    assert [line["name"] for line in lines] == ["planning", "planned", "begin", "first", "last"]
    result = told([{"name": "data", "time": lines[0]["time"]}, *lines], rounds=3)
    assert result["start"] == pytest.approx(result["setup"] + result["first"], abs=1e-6)
    assert 0 < result["round"] < lines[-1]["time"] - lines[0]["time"]


@pytest.mark.parametrize("name", ["har-uneven", "esn"])
def test_two_processes_do_what_the_loop_does(name, tmp_path):
    from suite import workloads
    from suite.engines import loop, processes
    from suite.measuring import difference

    workload = workloads.make(name, quick=True)
    (expected, _), (found, _) = (trained(workload, engine, 2, tmp_path) for engine in (loop, processes))
    assert difference(expected, found) < 1e-4


def test_a_few_are_drawn_of_many(tmp_path):
    from suite import workloads
    from suite.engines import ours, pfl_research

    workload = workloads.make("drawn-1000", quick=True)
    assert workload.drawn == 4 < workload.clients and pfl_research.refuses(workload) == "clients are drawn"
    trained(workload, ours, 2, tmp_path)


def test_processor_time_and_memory_are_those_of_children_too():
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
    assert memory(process.pid) == 0 and cpu_seconds(os.getpid()) - before > 0.25  # of those that have ended, too


def test_reports_say_what_was_measured(tmp_path):
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
    found = report.read(tmp_path)
    rows = report.table(found).splitlines()
    assert len(rows) == 6
    assert "| ours | 100.0 ms (100.0 to 100.0) | 0.38 (0.25 to 0.50) | 100.0 ms | 100 MiB | 2.00 s | 2e-07 |" in rows[3]
    assert "| loop, two processes |" in rows[4] and "0.50 (0.50 to 0.50)" in rows[4]
    assert "| pfl 0.6 | a / b |" in rows[5]
    assert report.scale(found).splitlines()[2] == "| 1,000 | 0.50 s | 1.00 s | 10.0 ms | 100 MiB | 1.00 | 7 MiB |"
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    report.fill(document, "a", "new")
    report.fill(document, "a", "newer\n")
    assert document.read_text() == "before\n<!-- a: begin -->\n\nnewer\n\n<!-- a: end -->\nafter\n"
    with pytest.raises(ValueError, match="marks of `b`"):
        report.fill(document, "b", "")
    report.plot(found, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").stat().st_size > 10_000


def test_the_documents_have_the_marks():
    for path, name in ((FOLDER / "README.md", "suite"), (FOLDER.parent / "docs" / "scale.md", "drawn")):
        assert path.read_text().count(f"<!-- {name}: ") == 2


@pytest.mark.slow
@pytest.mark.long
def test_the_command_measures_in_processes_that_do_what_the_loop_does(tmp_path, monkeypatch, capsys):
    words = ["--quick", "--repeats", "1", "--out", str(tmp_path), "--workloads", "digits-100"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--engines", "loop", "ours", "loop-two"])
    importlib.import_module("run").main()
    assert "| 100 clients x 15 digits, MLP 64-32-10 | loop, two processes |" in capsys.readouterr().out
    measured = json.loads((tmp_path / "suite-digits-100.json").read_text())["engines"]
    for engine in ("ours", "loop-two"):
        (found,) = measured[engine]
        assert found["differs"] < 1e-4 and found["round"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pfl", "flower"])
@pytest.mark.parametrize("name", ["digits-100", "har-uneven", "esn"])
def test_others_do_what_the_loop_does(name, engine):
    from suite.measuring import ENGINES, measured

    python = ENVIRONMENTS / f"env-{ENGINES[engine]}" / "bin" / "python"
    if not python.exists():
        pytest.skip("`python benchmarks/run.py --quick` makes its environment")
    assert "error" not in measured(name, "loop", sys.executable, quick=True)
    start = time.monotonic()
    found = measured(name, engine, str(python), quick=True)
    if engine == "pfl" and name == "esn":
        assert found == {"error": "refused: its algorithms train by gradients"}
        return
    assert found["differs"] < 1e-4 and 0 < found["round"] < time.monotonic() - start


@pytest.mark.slow
@pytest.mark.long
def test_a_measurement_ends_with_the_one_who_measures(tmp_path):
    from suite.marks import processes

    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--out", str(tmp_path), "--repeats", "50"]
    command += ["--workloads", "digits-100", "--engines", "loop-two"]
    measuring = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        started = set()
        while len(started) < 2 and time.monotonic() < end:  # the measurement and one of its own
            time.sleep(0.2)
            started = processes(measuring.pid) - {measuring.pid}
    finally:
        measuring.kill()
        measuring.wait()
    assert len(started) >= 2
    while (left := [pid for pid in started if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left
