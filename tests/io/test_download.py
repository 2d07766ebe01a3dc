import hashlib
import http.server
import subprocess
import sys
import threading

import pytest
from raising import raises

from lightning_fcl.errors import ConnectionFailedError, DiskFullError, FileAccessError, InvalidValueError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.download import download
from lightning_fcl.io.paths import cache_folder

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Host:
    """A web server that serves one file. The given faults apply to the first requests, in order."""

    def __init__(self, *faults):
        self.faults, self.asked, host = list(faults), [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                host.asked.append(self.path)
                fault = host.faults.pop(0) if host.faults else ""
                if isinstance(fault, int):
                    return self._empty(fault)
                if fault == "redirect":
                    return self._empty(302, "/elsewhere")
                body = bytearray(CONTENT)
                if fault == "wrong byte":
                    body[-1] ^= 1
                if fault == "too much":
                    body += b"more"
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(body[: len(body) // 3])
                    self.wfile.flush()
                    self.close_connection = True
                    return self.connection.shutdown(2)
                self.wfile.write(body)

            def _empty(self, status, location=None):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/file.bin"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def host():
    hosts = []

    def make(*faults):
        hosts.append(Host(*faults))
        return hosts[-1]

    yield make
    for one in hosts:
        one.server.shutdown()
        one.server.server_close()


@pytest.mark.parametrize("known", [DIGEST, f"md5:{hashlib.md5(CONTENT).hexdigest()}"])
@pytest.mark.parametrize("faults", [(), ("redirect",)])
def test_download_writes_only_the_complete_file(host, tmp_path, faults, known):
    assert download(host(*faults).url, tmp_path / "new" / "file.bin", known).read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["file.bin"]


@pytest.mark.parametrize("fault", ["wrong byte", "too much"])
def test_download_wrong_checksum_raises_and_keeps_no_file(host, tmp_path, fault):
    served, path = host(fault), tmp_path / "file.bin"
    with raises(InvalidValueError, "sha256"):
        download(served.url, path, DIGEST)
    assert list(tmp_path.iterdir()) == []
    assert download(served.url, path, DIGEST).read_bytes() == CONTENT


def test_download_undamaged_existing_file_sends_no_request(host, tmp_path, monkeypatch):
    served, path = host(), tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    assert download(served.url, path, DIGEST) == path
    assert served.asked == []


def test_download_damaged_existing_file_is_downloaded_again(host, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT[:-1])
    assert download(host().url, path, DIGEST).read_bytes() == CONTENT


def test_download_in_offline_mode_raises(host, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with raises(ConnectionFailedError, value=tmp_path / "file.bin"):
        download(host().url, tmp_path / "file.bin", DIGEST)


@pytest.mark.parametrize("fault", [404, 500, "cut"])
def test_download_failed_request_raises_and_can_be_repeated(host, tmp_path, fault):
    served, path = host(fault), tmp_path / "file.bin"
    with raises(ConnectionFailedError, value=served.url):
        download(served.url, path, DIGEST, " and so on")
    assert list(tmp_path.iterdir()) == []
    assert download(served.url, path, DIGEST).read_bytes() == CONTENT


@pytest.mark.seconds
def test_download_in_two_processes_at_once_succeeds(host, tmp_path):
    served, path = host(), tmp_path / "file.bin"
    code = "import sys; from pathlib import Path; from lightning_fcl.io.download import download;"
    code += "download(sys.argv[1], Path(sys.argv[2]), sys.argv[3])"
    words = [sys.executable, "-c", code, served.url, str(path), DIGEST]
    both = [subprocess.Popen(words) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert path.read_bytes() == CONTENT and list(tmp_path.iterdir()) == [path]


def test_download_failure_keeps_the_existing_file(host, tmp_path, monkeypatch):
    path = tmp_path / "file.bin"
    path.write_bytes(b"another")
    for fault, kind, argument in (
        ("wrong byte", InvalidValueError, "sha256"),
        (404, ConnectionFailedError, None),
    ):
        served = host(fault)
        with raises(kind, argument, value=DIGEST if argument else served.url):
            download(served.url, path, DIGEST)
        assert path.read_bytes() == b"another" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    with raises(ConnectionFailedError, value=path):
        download(host().url, path, DIGEST)
    assert path.read_bytes() == b"another" and list(tmp_path.iterdir()) == [path]


def test_download_and_write_atomic_replace_links(host, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "cache"
    folder.mkdir()
    victim.write_bytes(b"whole")
    for name in ("file.bin", ".file.txt.tmp", "file.txt"):
        (folder / name).symlink_to(victim)
    assert download(host().url, folder / "file.bin", DIGEST).read_bytes() == CONTENT
    assert write_atomic(folder / "file.txt", "text").read_text() == "text"
    assert victim.read_bytes() == b"whole" and {file.name for file in folder.iterdir()} == {"file.bin", "file.txt"}


def test_download_full_disk_raises_disk_full_error(host, tmp_path, full_disk):
    path, served = tmp_path / "file.bin", host()
    with full_disk(4096), raises(DiskFullError, value=path):
        download(served.url, path, DIGEST)
    assert len(served.asked) == 1 and list(tmp_path.iterdir()) == []
    assert download(served.url, path, DIGEST).read_bytes() == CONTENT


def test_download_unwritable_cache_raises_file_access_error(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("no folder")
    path = cache_folder() / "file.bin"
    with raises(FileAccessError, value=path):
        download("http://127.0.0.1:1/file.bin", path, DIGEST)


ADDER = """
import sys, time
from pathlib import Path
from lightning_fcl.io.atomic import file_lock
number, lock = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(60):
    with file_lock(lock):
        found = int(number.read_text())
        time.sleep(0.001)
        number.write_text(str(found + 1))
"""


@pytest.mark.seconds
def test_file_lock_is_exclusive_although_its_file_is_removed(tmp_path):
    number, lock = tmp_path / "number", tmp_path / ".lock"
    number.write_text("0")
    words = [sys.executable, "-c", ADDER, str(number), str(lock)]
    assert [process.wait(100) for process in [subprocess.Popen(words) for _ in range(4)]] == [0] * 4
    assert number.read_text() == "240" and list(tmp_path.iterdir()) == [number]
