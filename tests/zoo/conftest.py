"""A small zoo in a folder, and that folder on loopback."""

import functools
import http.server
import threading

import pytest

from lightning_fcl.zoo.registry import collect, package_folder

NAME = "mlp.digits.flwf2t_replay"


@pytest.fixture
def small_zoo(tmp_path, monkeypatch):
    """A zoo of one network, which LIGHTNING_FCL_ZOO names; nothing is cached yet."""
    folder = tmp_path / "zoo"
    collect(NAME, package_folder() / NAME, folder)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(folder))
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def serve():
    """Serves folders: makes the URL of one, and the list of what it is asked for."""
    servers = []

    def make(folder):
        asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_):
                asked.append(self.path)

            def log_message(self, *_):
                pass

        handler = functools.partial(Handler, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()
