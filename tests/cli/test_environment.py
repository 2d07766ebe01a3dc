"""Tests of commands without a home directory, a usable output, a working directory or enough memory."""

import os
import subprocess
import sys

import pytest

MAIN = [sys.executable, "-m", "lightning_fcl.cli.main"]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a shell script. In the script, $FCL starts the command line of the library.

    The function returns the exit status and the error output.
    """

    def ended(script, **variables):
        environment = {**os.environ, "FCL": " ".join(MAIN), "LIGHTNING_FCL_CACHE": str(tmp_path / "cache"), **variables}
        environment.pop("PYTHONUNBUFFERED", None)
        done = subprocess.run(
            ["sh", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        return done.returncode, done.stderr

    return ended


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("$FCL --help > /dev/full", "Expected to write to standard output, but got: [Errno 28]"),
        ("$FCL ls recipes > /dev/full", "[Errno 28] No space left on device"),
        ("mkdir gone && cd gone && rmdir ../gone && $FCL ls recipes", "Expected a working directory, but it was del"),
        ("PYTHONOPTIMIZE=2 $FCL ls recipes", "Unset PYTHONOPTIMIZE, and run Python without -OO."),
        ("ulimit -v 1000000; $FCL fit quickstart --out out", "Expected more memory"),
    ],
)
def test_command_unusable_environment_prints_one_message(run, script, message):
    code, said = run(script)
    assert code == 2 and said.count("lightning-fcl: error: ") == 1 and message in said


@pytest.mark.seconds
@pytest.mark.processes
def test_command_closed_streams_writes_files(run, tmp_path):
    assert run("$FCL cp quickstart my.yaml <&- >&-") == (0, "")
    assert "Federat" in (tmp_path / "my.yaml").read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("home", ["home", pytest.param("/proc/nothing", marks=pytest.mark.long)])
def test_fit_does_not_use_home_directory(run, tmp_path, tiny, home):
    (tmp_path / "home").mkdir()
    code, said = run(f"$FCL fit {' '.join(tiny)} --trainer.max_epochs 1 --out out", HOME=str(tmp_path / home))
    assert code == 0, said
    assert not any((tmp_path / "home").iterdir())
    assert (tmp_path / "out" / "results.json").is_file()


FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.seconds
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config", "FILE"],
        ["fit", "FILE"],
        ["fit", "quickstart", "--data", "FILE", "--out", "out"],
        ["fit", "quickstart", "--ckpt_path", "FILE", "--out", "out", "--trainer.logger", "false"],
        ["test", "FILE", "--ckpt_path", "last.ckpt"],
        ["validate", "FILE"],
        ["cp", "FILE", "copy.yaml"],
        ["tune", "FILE"],
        ["edge-report", "quickstart", "--profile", "FILE"],
        ["report", "FILE"],
        ["test", "run"],
        ["export", "run"],
        ["report", "run"],
        ["zoo", "push", "run", "--name", "a.b", "--to", "zoo"],
    ],
)
def test_command_endless_file_prints_one_message(tmp_path, monkeypatch, capsys, kind, words, error_of):
    """The file is a pipe without a writer or an endless device. A command that reads the file would never end."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file.yaml"
    FILES[kind](file)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    for name in ("results.json", "record.jsonl", "checkpoints/last.ckpt"):
        FILES[kind](run / name)
    message = error_of([str(file) if word == "FILE" else word for word in words])
    assert message.startswith("Expected ") and "Traceback" not in message
