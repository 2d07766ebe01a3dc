"""Tests of `environment.json` and `metrics.json`: versions, git commit, checksums, and no paths or names of hosts."""

import hashlib
import json
import platform
import re
import shutil
import socket
import subprocess
from importlib.metadata import version

import numpy as np
import pytest

from lightning_fcl import FederatedStream
from lightning_fcl.cli.main import main
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.runs.environment import make_environment


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make_stream(x, y, **options):
    stream = FederatedStream.from_arrays(x, y, scenario=Stationary(1), partition=IID(2), **options)
    stream.setup("fit")
    return stream


@pytest.mark.seconds
def test_fit_writes_environment_and_metrics(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    main(["fit", *tiny, "--out", str(out)])
    text = (out / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["python"] == platform.python_version()
    assert environment["packages"]["torch"] == version("torch") and environment["packages"]["numpy"] == np.__version__
    assert environment["recipe_sha256"] == hashlib.sha256((out / "config.yaml").read_bytes()).hexdigest()
    assert environment["data"]["name"] == "digits" and environment["data"]["samples"] == 1797
    assert re.fullmatch("[0-9a-f]{64}", environment["data"]["sha256"])
    assert str(tmp_path) not in text and socket.gethostname() not in json.dumps(environment["packages"])
    assert not re.search(r"https?:|/home/|/usr/|/tmp/|@ file", text)
    metrics = json.loads((out / "metrics.json").read_text())
    results = read_results(out)
    assert metrics == {
        name: value for name, value in results["metrics"].items() if name.endswith(("/server", "/clients", "/total"))
    }
    assert "metrics.json" in (out / "files.txt").read_text() and results["machine"] == environment["machine"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_make_environment_records_commit_and_changes(tmp_path, monkeypatch):
    stream = make_stream(np.zeros((20, 2), np.float32), np.arange(20) % 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert make_environment(stream, tmp_path)["git"] is None
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert make_environment(stream, tmp_path)["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("a = 2\n")
    assert make_environment(stream, tmp_path)["git"] == {"commit": commit, "dirty": True}


def test_make_environment_checksum_follows_every_part_of_the_data(tmp_path):
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(30, 3)).astype(np.float32), np.arange(30) % 3, np.repeat(["a", "b", "c"], 10)

    def digest(*arrays, **options):
        return make_environment(make_stream(*arrays, **options), tmp_path)["data"]["sha256"]

    changed_x, changed_y, changed_owner = x.copy(), y.copy(), owner.copy()
    changed_x[7, 1] += 1e-6
    changed_y[[0, 1]] = y[[1, 0]]
    changed_owner[0] = "b"
    digests = [
        digest(x, y),
        digest(changed_x, y),
        digest(x, changed_y),
        digest(x, y, client_ids=owner),
        digest(x, y, client_ids=changed_owner),
        digest(x.reshape(30, 3, 1), y),
    ]
    assert len({*digests}) == len(digests)
    assert digest(x.copy(), y.copy()) == digests[0]
