"""Networks from a static web server, and from a stand-in for the Hugging Face hub, both on loopback."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from lightning_fcl import zoo
from lightning_fcl.evaluation.files import sha256
from lightning_fcl.zoo.entry import CARD, CHECK, CONFIG, WEIGHTS
from lightning_fcl.zoo.registry import REGISTRY, collect, package_folder

NAME = "mlp.digits.flwf2t_replay"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def label_of(name):
    return zoo.load(name).predict([[[8.0] * 8] * 8])[0].label


@pytest.fixture
def remote(small_zoo, serve, monkeypatch):
    """The zoo on a server, with its registry's SHA-256 in the setting."""
    url, asked = serve(small_zoo)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", f"{url}#sha256={sha256(small_zoo / REGISTRY)}")
    return asked


def test_from_a_url_once(remote, monkeypatch):
    found = label_of(NAME)
    assert sorted(remote) == sorted([f"/{REGISTRY}", *(f"/{NAME}/{file}" for file in (CONFIG, WEIGHTS, CHECK, CARD))])
    remote.clear()
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    assert label_of(NAME) == found and remote == []


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, CHECK, CARD])
def test_another_file_than_the_registry_tells_is_refused(small_zoo, remote, name):
    file = small_zoo / NAME / name
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="Expected the file of SHA-256"):
        zoo.load(NAME)
    file.write_bytes(data)
    assert label_of(NAME)


def test_another_registry_than_the_setting_tells_is_refused(small_zoo, remote):
    shutil.copytree(small_zoo / NAME, small_zoo / "mlp.other")
    collect("mlp.other", small_zoo / NAME, small_zoo)
    with pytest.raises(ValueError, match=r"Expected the file of SHA-256 .*registry\.json"):
        zoo.load(NAME)


def test_a_damaged_copy_in_the_cache_is_brought_anew(remote, tmp_path):
    found = label_of(NAME)
    (copy,) = (tmp_path / "cache").rglob(WEIGHTS)
    copy.write_bytes(copy.read_bytes()[:-1])
    assert label_of(NAME) == found


def test_files_of_the_packages_registry_come_from_a_url_without_a_digest(small_zoo, serve, monkeypatch, tmp_path):
    inside = tmp_path / "package"
    inside.mkdir()
    shutil.copy(package_folder() / REGISTRY, inside)
    monkeypatch.setattr("lightning_fcl.zoo.registry.package_folder", lambda: inside)
    monkeypatch.delenv("LIGHTNING_FCL_ZOO")
    with pytest.raises(
        FileNotFoundError, match="Point LIGHTNING_FCL_ZOO at the folder `zoo` of a checkout, or at a URL"
    ):
        zoo.load(NAME)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", serve(small_zoo)[0])
    assert label_of(NAME)


def test_two_processes_at_once(remote):
    code = f"from lightning_fcl import zoo; print(zoo.load({NAME!r}).predict([[[8.0] * 8] * 8])[0].label)"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=100)[0] for process in both)
    assert first == second != "" and len(remote) == len(set(remote)) == 5


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs: one repository at one commit."""

    folder, asked = None, []

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        self.asked.append((self.command, self.path))
        prefix = f"/our/models/resolve/{COMMIT}/"
        file = self.folder / self.path.removeprefix(prefix)
        if not self.path.startswith(prefix) or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(small_zoo, tmp_path):
    """Runs code in a process whose hub is on loopback."""
    handler = type("Handler", (Hub,), {"folder": small_zoo / NAME, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | own

    def run(name):
        code = f"from lightning_fcl import zoo; print(zoo.load({name!r}).predict([[[8.0] * 8] * 8])[0].label)"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)

    yield run
    server.shutdown()
    server.server_close()


def test_from_the_hub_at_a_commit(hub, small_zoo):
    done = hub(f"hf:our/models@{COMMIT}")
    assert done.stdout.strip() == label_of(NAME), done.stderr


def test_a_changed_file_of_the_hub_is_refused(hub, small_zoo):
    config = small_zoo / NAME / CONFIG
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"version": 7}, indent=1, ensure_ascii=False) + "\n")
    assert "its checksum is another" in hub(f"hf:our/models@{COMMIT}").stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:our/models", "and the 40 digits of a commit"),
        ("hf:our/models@main", "and the 40 digits of a commit"),
        (f"hf:our/nothing@{COMMIT}", "ConnectionError: Expected to get hf:our/nothing@"),
    ],
)
def test_the_hub_is_asked_for_a_commit_that_it_has(hub, name, message):
    assert message in hub(name).stderr
