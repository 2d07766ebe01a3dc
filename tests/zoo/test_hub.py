"""Tests of downloads from and uploads to a fake Hugging Face hub on the loopback interface."""

import base64
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from raising import raises

from lightning_fcl import zoo
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.zoo.model_entry import CARD, CHECK, CHECKSUMS_FILE, CONFIG, CONTINUE, WEIGHTS

NAME = "mlp.digits.flwf2t_replay"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LABEL = """
from lightning_fcl import zoo
print(zoo.load({name!r}).predict([[[8.0] * 8] * 8])[0].label)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """A request handler that implements uploads to and downloads from the repository our/models of a hub.

    Attributes:
        commits: Files of each commit. The newest commit is last.
    """

    protocol_version = "HTTP/1.1"
    commits: dict[str, dict[str, bytes]]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.path.startswith("/api/models/our/models"):
            commit, files = [*self.commits.items()][-1]
            if "/tree/" in self.path:
                tree = [{"type": "file", "path": name, "oid": "", "size": len(data)} for name, data in files.items()]
                return self._json(tree)
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": "our/models", "sha": commit, "siblings": siblings, "private": False})
        told = re.fullmatch(r"/our/models/resolve/([0-9a-f]{40})/(.+)", self.path)
        data = self.commits.get(told[1], {}).get(told[2]) if told else None
        if data is None:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha256(data).hexdigest()
        return self._answer(200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": told[1]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer ours":
            return self._json({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            return self._json({"url": "http://127.0.0.1/our/models"})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self._json(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        if "/commit/" in self.path:
            return self._commit([json.loads(line) for line in body.splitlines()])
        return self._json({})

    def _commit(self, lines):
        newest = [*self.commits][-1]
        files = dict(self.commits[newest])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") != newest:
                return self._json({"error": "A commit has happened since."}, 412)
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "deletedFile":
                files.pop(value["path"])
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        url = f"http://127.0.0.1/our/models/commit/{commit}"
        return self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _json(self, content, status=200):
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status, data, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def commits(small_zoo):
    """Return the content of the fake hub: one commit with the files of a published network."""
    return {COMMIT: {file.name: file.read_bytes() for file in (small_zoo / NAME).iterdir()}}


@pytest.fixture
def hub(commits, tmp_path):
    """Yield a function that runs Python with arguments in a process that uses the fake hub."""
    handler = type("Handler", (Hub,), {"commits": commits})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | own

    def run(*words, token="ours"):
        return subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment | {"HF_TOKEN": token}
        )

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.seconds
def test_load_from_hub_at_commit(hub):
    done, here = (hub("-c", LABEL.format(name=name)) for name in (f"hf:our/models@{COMMIT}", NAME))
    assert done.stdout == here.stdout != "", done.stderr


@pytest.mark.seconds
def test_load_from_hub_changed_file_raises(hub, commits):
    commits[COMMIT][CONFIG] = commits[COMMIT][CONFIG].replace(b'"version": 1', b'"version": 7')
    assert "but the checksum differs" in hub("-c", LABEL.format(name=f"hf:our/models@{COMMIT}")).stderr


@pytest.mark.parametrize("name", ["hf:our/models", "hf:our/models@main"])
def test_load_from_hub_without_commit_raises(name):
    with raises(InvalidValueError, "name"):
        zoo.load(name)


TWICE = """
from lightning_fcl import zoo
from lightning_fcl.errors import ConnectionFailedError
try:
    zoo.load({missing!r})
except ConnectionFailedError as error:
    print(error)
print(zoo.load({name!r}).entry.name)
"""


@pytest.mark.seconds
def test_load_from_hub_missing_repository_raises_with_hint(hub):
    done = hub("-c", TWICE.format(missing=f"hf:our/nothing@{COMMIT}", name=f"hf:our/models@{COMMIT}"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Expected to get hf:our/nothing@")
    assert "Check the name, or try again." in done.stdout and done.stdout.endswith(f"{NAME}\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory, fit_small, small_recipe):
    """Return the folder of a small run."""
    return str(fit_small(tmp_path_factory.mktemp("run"), small_recipe(rounds=1, clients=3)))


def push(run, name, to="hf:our/models"):
    return ["-m", "lightning_fcl.cli.main", "zoo", "push", run, "--name", name, "--to", to]


@pytest.mark.slow
def test_push_run_creates_next_version(hub, commits, run):
    commits[COMMIT] |= {"notes.txt": b"ours", CONTINUE: b"of the version before"}
    done = hub(*push(run, NAME))
    assert done.returncode == 0, done.stderr
    commit, files = [*commits.items()][-1]
    assert f"hf:our/models@{commit}" in done.stdout
    assert sorted(files) == sorted([CARD, CHECK, CONFIG, CONTINUE, CHECKSUMS_FILE, WEIGHTS, "notes.txt"])
    assert json.loads(files[CONFIG])["version"] == 2 and files[CONTINUE] != b"of the version before"
    assert hub("-c", LABEL.format(name=f"hf:our/models@{commit}")).stdout.strip().isdigit()


REFUSED = """
from lightning_fcl.cli.main import main
for words in {pushes!r}:
    try:
        main(words)
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.slow
def test_push_rejected_changes_nothing(hub, commits, run):
    pushes = [push(run, "mlp.other"), push(run, NAME, f"hf:our/models@{COMMIT}"), push(run, NAME)]
    done = hub("-c", REFUSED.format(pushes=[words[2:] for words in pushes]), token="theirs")
    assert done.stdout.split() == ["2", "2", "2"], done.stderr
    assert (
        f"Expected hf:our/models to contain mlp.other, but it contains {NAME}. Publish as {NAME}, or use another "
        "repository." in done.stderr
    )
    assert "Expected hf:organization/repository to publish to" in done.stderr
    assert "Log in with `hf auth login`" in done.stderr
    assert [*commits] == [COMMIT]


LATE = """
from pathlib import Path
from lightning_fcl.zoo.registry import get_repo_head, upload
upload(Path({run!r}), get_repo_head("hf:our/models")._replace(commit="0" * 40), "of an older head")
"""


@pytest.mark.seconds
def test_push_with_outdated_head_raises(hub, commits, run):
    assert "ConnectionFailedError: Expected to upload" in hub("-c", LATE.format(run=run)).stderr
    assert [*commits] == [COMMIT]


@pytest.mark.seconds
def test_load_from_hub_unwritable_cache_raises(hub, tmp_path):
    (tmp_path / "hf").write_text("no folder")
    done = hub("-m", "lightning_fcl.cli.main", "zoo", "info", f"hf:our/models@{COMMIT}")
    assert done.returncode == 2 and done.stderr.count("Expected") == 1, done.stderr
    assert f"Expected to write {tmp_path / 'hf' / 'hub'}, but got: " in done.stderr
