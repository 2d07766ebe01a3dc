import errno
import hashlib
import http.server
import os
import subprocess
import sys
import threading

import pytest

from lightning_fcl.errors import NoRoomError
from lightning_fcl.evaluation.files import cache_folder, write_whole
from lightning_fcl.hub.download import download

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Host:
    """Serves one file, with a fault at each of the first requests."""

    def __init__(self, *faults):
        self.faults, self.asked, host = list(faults), [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                begin = self.headers.get("Range", "bytes=0-")
                start = int(begin.removeprefix("bytes=").removesuffix("-"))
                host.asked.append((self.path, start))
                fault = host.faults.pop(0) if host.faults else ""
                if isinstance(fault, int):
                    return self._empty(fault)
                if fault == "redirect":
                    return self._empty(302, "/elsewhere")
                start = 0 if fault == "no ranges" else start
                if start >= len(CONTENT):
                    return self._empty(416)
                body = bytearray(CONTENT[start:])
                if fault == "wrong byte":
                    body[-1] ^= 1
                if fault == "too much":
                    body += b"more"
                self.send_response(206 if start else 200)
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


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("faults", "resumes"),
    [
        ((), [False]),
        (("cut",), [False, True]),
        (("cut", "no ranges"), [False, True]),
        (("cut", "cut"), [False, True, True]),
        ((500, 503), [False, False, False]),
        (("redirect",), [False, False]),
    ],
)
def test_what_breaks_on_the_way_goes_on_where_it_stopped(host, tmp_path, faults, resumes):
    served, path = host(*faults), tmp_path / "file.bin"
    assert download(served.url, path, DIGEST, len(CONTENT), wait=0.01).read_bytes() == CONTENT
    assert [start > 0 for _, start in served.asked] == resumes
    assert {file.name for file in tmp_path.iterdir()} == {"file.bin"}


@pytest.mark.seconds
@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("fault", ["wrong byte", "too much"])
def test_another_file_is_refused_and_nothing_of_it_is_kept(host, tmp_path, fault, size):
    served, path = host(fault), tmp_path / "file.bin"
    with pytest.raises(ValueError, match=f"Expected the file of SHA-256 {DIGEST}"):
        download(served.url, path, DIGEST, size, wait=0.01)
    assert list(tmp_path.iterdir()) == []
    assert download(served.url, path, DIGEST, size, wait=0.01).read_bytes() == CONTENT


@pytest.mark.seconds
def test_a_part_of_another_file_is_not_gone_on_from(host, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(b"another" * 1000)
    assert download(host().url, tmp_path / "file.bin", DIGEST, wait=0.01).read_bytes() == CONTENT


@pytest.mark.seconds
def test_a_part_that_is_too_long_is_not_gone_on_from(host, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT * 2)
    for size in (len(CONTENT), None):
        (tmp_path / "file.bin").unlink(missing_ok=True)
        assert download(host().url, tmp_path / "file.bin", DIGEST, size, wait=0.01).read_bytes() == CONTENT


@pytest.mark.seconds
def test_what_is_there_and_whole_is_not_asked_for(host, tmp_path, monkeypatch):
    served, path = host(), tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    assert download(served.url, path, DIGEST) == path
    assert served.asked == []


@pytest.mark.seconds
def test_what_is_there_and_damaged_is_asked_for_again(host, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT[:-1])
    assert download(host().url, path, DIGEST).read_bytes() == CONTENT


@pytest.mark.seconds
def test_offline_says_so(host, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="as nothing is downloaded in offline mode"):
        download(host().url, tmp_path / "file.bin", DIGEST)


@pytest.mark.seconds
def test_what_a_host_does_not_have_is_asked_for_once(host, tmp_path):
    served = host(404)
    with pytest.raises(ConnectionError, match=r"HTTP status 404\. Try again, or download it by hand"):
        download(served.url, tmp_path / "file.bin", DIGEST, wait=0.01)
    assert len(served.asked) == 1


@pytest.mark.seconds
def test_a_host_that_keeps_breaking_is_named(host, tmp_path):
    with pytest.raises(ConnectionError, match="HTTP status 500"):
        download(host(500, 500, 500, 500).url, tmp_path / "file.bin", DIGEST, wait=0.01)


@pytest.mark.seconds
def test_two_processes_at_once_ask_for_it_once(host, tmp_path):
    served, path = host(), tmp_path / "file.bin"
    code = "import sys; from pathlib import Path; from lightning_fcl.hub.download import download;"
    code += "download(sys.argv[1], Path(sys.argv[2]), sys.argv[3])"
    words = [sys.executable, "-c", code, served.url, str(path), DIGEST]
    both = [subprocess.Popen(words) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert path.read_bytes() == CONTENT
    assert len(served.asked) == 1


def test_what_is_there_stays_until_the_new_one_is_verified(host, tmp_path, monkeypatch):
    path = tmp_path / "file.bin"
    path.write_bytes(b"another")
    for fault, error in (("wrong byte", ValueError), (404, ConnectionError)):
        with pytest.raises(error, match=r"^Expected "):
            download(host(fault).url, path, DIGEST, wait=0.01)
        assert path.read_bytes() == b"another" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setenv("LIGHTNING_FCL_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="offline"):
        download(host().url, path, DIGEST)
    assert path.read_bytes() == b"another" and list(tmp_path.iterdir()) == [path]


def test_links_beside_a_file_are_not_written_through(host, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "cache"
    folder.mkdir()
    victim.write_bytes(b"whole")
    for name in ("file.bin", ".file.bin.part", ".file.bin.lock", ".file.txt.tmp", "file.txt"):
        (folder / name).symlink_to(victim)
    assert download(host().url, folder / "file.bin", DIGEST).read_bytes() == CONTENT
    assert write_whole(folder / "file.txt", "text").read_text() == "text"
    assert victim.read_bytes() == b"whole" and {file.name for file in folder.iterdir()} == {"file.bin", "file.txt"}


def test_a_full_disk_is_no_broken_connection(host, tmp_path, full_disk):
    path, served = tmp_path / "file.bin", host()
    with full_disk(4096), pytest.raises(NoRoomError, match=rf"Expected 1,024,000 bytes for {path} .* try again"):
        download(served.url, path, DIGEST, len(CONTENT))
    assert len(served.asked) == 1 and not path.exists()
    assert download(served.url, path, DIGEST, len(CONTENT)).read_bytes() == CONTENT
    assert served.asked[1][1] > 0  # it goes on where the disk was full


def test_a_cache_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("no folder")
    path = cache_folder() / "file.bin"
    with pytest.raises(OSError, match=rf"Expected to write {path} but got: .* name another by LIGHTNING_FCL_CACHE\."):
        download("http://127.0.0.1:1/file.bin", path, DIGEST)
    monkeypatch.setattr("lightning_fcl.hub.download.locked", read_only)  # root may write anywhere
    with pytest.raises(OSError, match=r"Read-only file system.* Make its folder one that can be written to"):
        download("http://127.0.0.1:1/file.bin", tmp_path / "file.bin", DIGEST)


def read_only(path):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


ADDER = """
import sys, time
from pathlib import Path
from lightning_fcl.evaluation.files import locked
number, lock = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(60):
    with locked(lock):
        found = int(number.read_text())
        time.sleep(0.001)
        number.write_text(str(found + 1))
"""


@pytest.mark.seconds
def test_one_at_a_time_also_where_the_locks_file_goes(tmp_path):
    number, lock = tmp_path / "number", tmp_path / ".lock"
    number.write_text("0")
    words = [sys.executable, "-c", ADDER, str(number), str(lock)]
    assert [process.wait(100) for process in [subprocess.Popen(words) for _ in range(4)]] == [0] * 4
    assert number.read_text() == "240" and list(tmp_path.iterdir()) == [number]
