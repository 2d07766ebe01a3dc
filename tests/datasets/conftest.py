"""What tests of downloads share: a server in the place of the publishers'."""

import hashlib
import http.server
import threading

import pytest


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Serves a file on this machine as a data set's URL with its digest; gives the file and the paths asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=tmp_path / "server")

        def log_message(self, *args):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def start(module, name, content):
        path = tmp_path / "server" / name
        path.parent.mkdir()
        path.write_bytes(content)
        monkeypatch.setattr(module, "URL", f"http://127.0.0.1:{server.server_port}/{name}")
        monkeypatch.setattr(module, "SHA256", hashlib.sha256(content).hexdigest())
        return path, asked

    yield start
    server.shutdown()
    thread.join()
    server.server_close()
