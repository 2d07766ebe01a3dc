"""A small zoo in a folder, that folder on loopback, and small runs."""

import functools
import http.server
import threading

import pytest
import torch
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.running.rows import config_words, recipes_folder
from lightning_fcl.zoo.registry import collect, package_folder

NAME = "mlp.digits.flwf2t_replay"


@pytest.fixture
def small_zoo(tmp_path, monkeypatch):
    """A zoo of one network, which LIGHTNING_FCL_ZOO names; nothing is cached yet."""
    folder = tmp_path / "zoo"
    collect(package_folder() / NAME, folder)
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(folder))
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    return folder


def empty_page(folder, results):
    """An empty file in place of a run's page, which takes longer than its rounds."""
    return write_whole(folder / "report.html", "")


@pytest.fixture(scope="session")
def fit_small():
    """Fits recipes of the package with changes over them, below a folder; the run's folder."""

    def fit(folder, *changes, recipes=("quickstart.yaml",), words=()):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [recipes_folder() / name for name in recipes]
        for number, content in enumerate(changes):
            paths.append(folder / f"change-{number}.yaml")
            paths[-1].write_text(yaml.safe_dump(content))
        with pytest.MonkeyPatch.context() as patch:  # reports are tested elsewhere, and take longer than the runs do
            patch.setattr("lightning_fcl.evaluation.results.write_page", empty_page)
            main(["fit", *config_words(paths), *words, "--out", str(folder / "out")])
        return folder / "out"

    return fit


@pytest.fixture
def tensors_of():
    """All tensors in dicts, lists and tuples of whatever depth."""

    def tensors(content):
        if isinstance(content, torch.Tensor):
            yield content
        elif isinstance(content, dict | list | tuple):
            for part in content.values() if isinstance(content, dict) else content:
                yield from tensors(part)

    return tensors


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
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()
