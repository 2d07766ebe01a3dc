"""Tests that the command and the pytest plugin distinguish correct from wrong third-party implementations."""

import subprocess
import sys

import pytest

from lightning_fcl.cli.main import main

RIGHT = """
from lightning_fcl.methods import Method, flatten

class Prox(Method):
    implements = "FedProx"

    def __init__(self, mu=0.1, clients="all"):
        super().__init__(clients)
        self.mu = mu

    def penalty(self, client, step):
        received = {name: step.received_state[name] for name in step.params}
        return self.mu / 2 * (flatten(step.params) - flatten(received)).square().sum()
"""
TEST = """
import pytest
from mine import Prox

@pytest.mark.conformance(kind=Prox)
def test_conformance(statement):
    statement.check(Prox)
"""
WRONG = {
    "towards zero": RIGHT.replace("(flatten(step.params) - flatten(received))", "flatten(step.params)"),
    "without the half": RIGHT.replace("self.mu / 2", "self.mu"),
}


def outcomes(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    try:
        main(["conformance", "mine.py"])
        ended = 0
    except SystemExit as end:
        ended = end.code
    said, wrong = capsys.readouterr()
    return ended, said.splitlines(), wrong


@pytest.mark.seconds
def test_conformance_correct_method_fulfills_all_statements(tmp_path, monkeypatch, capsys):
    ended, lines, _ = outcomes(RIGHT, tmp_path, monkeypatch, capsys)
    assert ended == 0 and lines[-1] == "10 of 10 statements hold."
    assert all(line.startswith("Prox") and line.endswith(": holds") for line in lines[:-1])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("way", "failing"),
    [
        ("towards zero", ["the penalty is mu / 2", "in a round of one step"]),
        ("without the half", ["the penalty is mu / 2"]),
    ],
)
def test_conformance_wrong_penalty_fails_matching_statements(way, failing, tmp_path, monkeypatch, capsys):
    ended, lines, wrong = outcomes(WRONG[way], tmp_path, monkeypatch, capsys)
    fails = [line for line in lines if ": fails: " in line]
    assert ended == 2 and f"but {len(failing)} of 10 failed" in wrong and len(fails) == len(failing)
    assert all(one in line for one, line in zip(failing, fails, strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "Expected a Python file at nothing.py, but the file does not exist."),
        (["FedProxx"], "Expected a method, or a file with a method, but got FedProxx. Did you mean FedProx?"),
        (["FedProx", "--method", "FedProxx"], "but got 'FedProxx'. Did you mean FedProx?"),
        (["lightning_fcl.models.MLP"], "Expected a method, or a file with a method, but got lightning_fcl.models.MLP"),
    ],
)
def test_conformance_invalid_target_raises(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["conformance", *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.seconds
def test_conformance_method_that_raises_fails_statements(tmp_path, monkeypatch, capsys):
    code = RIGHT.replace("return self.mu / 2 *", "raise ZeroDivisionError\n        return")
    ended, lines, _ = outcomes(code, tmp_path, monkeypatch, capsys)
    assert ended == 2 and sum(": fails: the check raised ZeroDivisionError" in line for line in lines) >= 8


@pytest.mark.seconds
def test_pytest_plugin_runs_each_statement(tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT)
    (tmp_path / "test_mine.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0 and "10 passed" in ended.stdout, ended.stdout[-3000:]
