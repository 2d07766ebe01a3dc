import hashlib
import http.server
import subprocess
import sys
import threading

import pytest

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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


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
    assert {file.name for file in tmp_path.iterdir()} <= {"file.bin", ".file.bin.lock"}


@pytest.mark.seconds
@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("fault", ["wrong byte", "too much"])
def test_another_file_is_refused_and_nothing_of_it_is_kept(host, tmp_path, fault, size):
    served, path = host(fault), tmp_path / "file.bin"
    with pytest.raises(ValueError, match=f"Expected the file of SHA-256 {DIGEST}"):
        download(served.url, path, DIGEST, size, wait=0.01)
    assert {file.name for file in tmp_path.iterdir()} <= {".file.bin.lock"}
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
