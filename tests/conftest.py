"""Shared fixtures: toy data, streams, tasks, fits, local web servers and browsers. Tests use one thread by default."""

import functools
import gc
import hashlib
import http.server
import io
import os
import resource
import shutil
import tarfile
import threading
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lightning.fabric.utilities.registry
import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.requirements import Requirement
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.cli.main import main
from lightning_fcl.data.partition import IID, Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental, FLwFScenario
from lightning_fcl.data.split import Split
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.models import MLP, EchoStateNetwork
from lightning_fcl.tasks.reservoir import ReservoirClassifier

collect_ignore = ["reliability"]  # `make test-fault-injection` runs this folder as a separate command.

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
warnings.filterwarnings("ignore", module="lightning")
# The first backward pass starts one thread for each GPU. After `torch.export`, PyTorch reports eight GPUs.
# A process with such threads cannot train in forks. So run a backward pass before any test.
torch.zeros((), requires_grad=True).backward()
# Each Trainer searches all installed packages for callbacks, which takes 30 ms. Search only once.
lightning.fabric.utilities.registry.entry_points = functools.cache(lightning.fabric.utilities.registry.entry_points)


def pytest_collection_finish():
    """Exclude all existing objects from garbage collection, so that each collection is faster."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Undo the exclusion of objects from garbage collection."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Set the same seed before each test, independent of other tests and of environment variables."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def brought():
    """Return a function that takes requirements and returns a dict of installed distributions by package name.

    The dict contains the packages of the requirements and all their dependencies, without packages for other platforms.
    """

    def by(requirements):
        ways = [(one.name, extra) for one in map(Requirement, requirements) for extra in ("", *one.extras)]
        seen, found = set(), {}
        while ways:
            name, extra = ways.pop()
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = package = distribution(name)
            except PackageNotFoundError:  # The package is only for other platforms.
                continue
            for one in map(Requirement, package.requires or []):
                if one.marker is None or one.marker.evaluate({"extra": extra}):
                    ways += [(one.name, part) for part in ("", *one.extras)]
        return found

    return by


@pytest.fixture(scope="session")
def install(brought):
    """Return a function that links the packages of some requirements into a folder, as in site-packages.

    The function returns the names of the files in site-packages that it did not link.
    """

    def into(folder, requirements):
        packages = Path(distribution("torch").locate_file(""))
        files = (file for package in brought(requirements).values() for file in package.files or [])
        for name in {file.parts[0] for file in files} - {".."}:
            if (packages / name).exists():
                (folder / name).symlink_to(packages / name)
        return [path.name for path in packages.iterdir() if not (folder / path.name).exists()]

    return into


@pytest.fixture
def data_folder():
    """The folder of the real data sets, from `LIGHTNING_FCL_DATA`. If this variable is not set, the test is skipped."""
    if not os.environ.get("LIGHTNING_FCL_DATA"):
        pytest.skip("LIGHTNING_FCL_DATA is not set")
    return os.environ["LIGHTNING_FCL_DATA"]


@pytest.fixture
def error_of(capsys):
    """Return a function that runs a command with invalid arguments and returns its error message as one line."""

    def message(words):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.split("error: ")[-1].split())

    return message


def toy_arrays(samples=240, features=6, classes=4, seed=0):
    """Return samples and labels of Gaussian classes with different means."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % classes
    x = rng.normal(size=(samples, features)) + 2 * np.eye(classes, features)[y]
    return x.astype(np.float32), y.astype(np.int64)


KINDS = {
    "class-incremental": ClassIncremental,
    "domain-incremental": DomainIncremental,
    "flwf": FLwFScenario,
    "iid": IID,
    "dirichlet": Dirichlet,
}


def stream_words(scenario="class-incremental", partition=None, num_clients=None, **kwargs):
    """Return the arguments of a stream. The function makes the scenario, partition and split from flat arguments."""
    if not isinstance(scenario, str):
        return {**kwargs, "scenario": scenario, "partition": KINDS[partition or "iid"](num_clients or 10)}
    kind = KINDS[scenario]
    own = {name: kwargs.pop(name) for name in list(kwargs) if name in kind.__dataclass_fields__}
    split = {name: kwargs.pop(name) for name in list(kwargs) if name in Split.__dataclass_fields__}
    words = {**kwargs, "scenario": kind(**own)}
    if num_clients is not None or partition is not None:
        words["partition"] = KINDS[partition or "iid"](num_clients or 10)
    return {**words, "split": Split(**split)} if split else words


@pytest.fixture
def make_stream():
    """Return a function that makes streams of toy data."""

    def make(client_ids=None, samples=240, **kwargs):
        x, y = toy_arrays(samples)
        scenario = kwargs.get("scenario", "class-incremental")
        words = {"num_clients": 3} if client_ids is None and scenario != "flwf" else {}
        words |= {"num_experiences": 2} if scenario == "class-incremental" else {}
        words |= {"batch_size": 8, "seed": 0, **kwargs}
        return FederatedStream.from_arrays(x, y, client_ids, **stream_words(**words))

    return make


@pytest.fixture
def make_task():
    """Return a function that makes small classifiers. By default, all have the same initial weights."""

    def make(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), model=None, seed=0):
        torch.manual_seed(seed)
        return Classifier(model if model is not None else MLP([6, 5, 4]), 4, optimizer)

    return make


@pytest.fixture(scope="session")
def small_recipe():
    """Return a function that makes overrides with which the quickstart recipe trains quickly."""

    def make(rounds, clients, rounds_per_experience=1, **data):
        strategy = {"init_args": {"local_epochs": 1}}
        scenario = {"init_args": {"num_experiences": 2, "rounds_per_experience": rounds_per_experience}}
        partition = {"class_path": "IID", "init_args": {"num_clients": clients}}
        return {
            "trainer": {"max_epochs": rounds, "enable_progress_bar": False, "strategy": strategy},
            "data": {"scenario": scenario, "partition": partition, **data},
        }

    return make


@pytest.fixture(scope="session")
def without_pages():
    """Return a context manager in which runs write empty reports. Writing a report takes longer than a small run."""
    return lambda: patch(
        "lightning_fcl.evaluation.results.write_page", lambda folder, _: write_atomic(folder / "report.html", "")
    )


@pytest.fixture
def quiet():
    """Arguments of a Trainer that prints nothing and writes no files."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }


@pytest.fixture
def fit(quiet):
    """Return a function that fits a module, prints nothing, and returns the Trainer."""

    def run(task, stream, callbacks=(), strategy=None, max_epochs=None, ckpt_path=None, trainer_args=None, **kwargs):
        options = {**quiet, **(trainer_args or {})}
        if max_epochs is None:
            stream.setup("fit")
            max_epochs = stream.plan.num_rounds
        trainer = L.Trainer(
            strategy=strategy or FederatedStrategy(**kwargs),
            max_epochs=max_epochs,
            callbacks=list(callbacks),
            **options,
        )
        trainer.fit(task, datamodule=stream, ckpt_path=ckpt_path)
        return trainer

    return run


def reservoir_by_hand(reservoir, x, gain=None, bias=None):
    """Return the net input, the activation and the state of all reservoir units, computed step by step in NumPy.

    The washout is not removed. All three arrays have the shape (batch, time, N_R). N_R is the number of units of all
    layers. ``gain`` and ``bias`` have the shape (N_R,), or (batch, N_R) for a different value in each sequence.
    """
    numbers = {name: value.double().numpy() for name, value in reservoir.state_dict().items()}
    gain = numbers["gain"] if gain is None else np.asarray(gain, dtype=np.float64)
    bias = numbers["bias"] if bias is None else np.asarray(bias, dtype=np.float64)
    drive, leak = np.asarray(x, dtype=np.float64), reservoir.leaking_rate
    layers = []
    for layer in range(reservoir.num_layers):
        units = slice(layer * reservoir.units, (layer + 1) * reservoir.units)
        w_in, w = numbers[f"input_weight_{layer}"], numbers[f"recurrent_weight_{layer}"]
        state, steps = np.zeros((len(drive), reservoir.units)), []
        for t in range(drive.shape[1]):
            net = drive[:, t] @ w_in.T + numbers["recurrent_bias"][units] + state @ w.T
            activation = np.tanh(gain[..., units] * net + bias[..., units])
            state = (1 - leak) * state + leak * activation
            steps.append((net, activation, state))
        layers.append([np.stack(column, axis=1) for column in zip(*steps, strict=True)])
        drive = layers[-1][2]
    return tuple(np.concatenate(parts, axis=-1) for parts in zip(*layers, strict=True))


def statistics_by_hand(reservoir, x, y, classes=4, signed=False, gain=None, bias=None):
    """Return the ridge statistics A = Y^T S and B = S^T S in NumPy, with one time step after the washout per row.

    S contains the states of all units, and Y contains the one-hot targets. With ``signed``, targets are -1 or 1.
    """
    states = reservoir_by_hand(reservoir, x, gain, bias)[2][:, reservoir.washout :]
    targets = np.repeat(np.eye(classes)[np.asarray(y)], states.shape[1], axis=0)
    states = states.reshape(-1, states.shape[-1])
    return (targets * 2 - 1 if signed else targets).T @ states, states.T @ states


def ridge_by_hand(a, b, beta):
    """Return the ridge readout W = A (B + beta I)^-1 in NumPy."""
    return np.linalg.solve(b + beta * np.eye(len(b)), a.T).T


@pytest.fixture
def by_numpy():
    """Return functions that compute the states, the ridge statistics and the ridge readout in NumPy."""
    return SimpleNamespace(run=reservoir_by_hand, statistics=statistics_by_hand, solve=ridge_by_hand)


def toy_series(samples=96, steps=9, features=3, classes=4, seed=0):
    """Return noisy sine waves and labels. The frequency depends on the class."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % classes
    phase = rng.uniform(0, 6, (samples, 1, features)) + np.arange(steps)[:, None] * (0.3 + 0.4 * y[:, None, None])
    return (np.sin(phase) + 0.3 * rng.normal(size=phase.shape)).astype(np.float32), y.astype(np.int64)


@pytest.fixture
def make_series():
    """Return a function that makes labeled sequences."""
    return toy_series


@pytest.fixture
def make_series_stream():
    """Return a function that makes streams of sequences. By default, clients have different numbers of samples.

    ``increments`` is the number of parts into which all data are split at random. Each part is one experience.
    """

    def make(clients=3, increments=1, seed=0, samples=96, steps=9, unequal=True, **kwargs):
        x, y = toy_series(samples, steps)
        rng = np.random.default_rng(seed)
        share = np.arange(1.0, clients + 1) if unequal else np.ones(clients)
        owners = rng.choice(clients, samples, p=share / share.sum())
        options = stream_words(**{"scenario": "domain-incremental", "batch_size": 8, "seed": 0, **kwargs})
        stream = FederatedStream.from_arrays(x, y, owners, rng.integers(increments, size=samples), **options)
        stream.setup("fit")
        return stream

    return make


@pytest.fixture
def make_reservoir():
    """Return a function that makes small reservoirs in double precision. By default, all have the same weights."""

    def make(**kwargs):
        options = {"units": 12, "leaking_rate": 0.6, "seed": 0, **kwargs}
        return EchoStateNetwork(3, **options).double()

    return make


@pytest.fixture
def make_reservoir_task(make_reservoir):
    """Return a function that makes sequence classifiers on small reservoirs in double precision."""

    def make(reservoir=None, **kwargs):
        reservoir = make_reservoir() if reservoir is None else reservoir
        return ReservoirClassifier(reservoir, 4, **{"beta": 1e-2, "min_samples": 1, **kwargs})

    return make


def packed(name: str, files: dict[str, bytes]) -> bytes:
    """Return the bytes of a zip or tar archive with the given files. The format depends on the name."""
    buffer = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, content in files.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def pack():
    """Return a function that packs files into a zip or tar archive. The format depends on the name."""
    return packed


@pytest.fixture
def serve_folder(monkeypatch):
    """Return a function that serves a folder over HTTP on this machine.

    The function returns the URL and a list that collects the requested paths.
    """
    servers = []
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def make(folder):
        asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_):
                asked.append(self.path)

            def log_message(self, *_):
                pass

        handler = functools.partial(Handler, directory=folder)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def serve(tmp_path, serve_folder):
    """Return a function that serves one file, or several files in an archive.

    The function returns a source with the URL and digest, the served file, and the list of requested paths.
    """

    def start(source, name, content):
        content = packed(name, content) if isinstance(content, dict) else content
        path = tmp_path / "server" / name
        path.parent.mkdir()
        path.write_bytes(content)
        url, asked = serve_folder(path.parent)
        kind = "md5" if source.digest.startswith("md5:") else "sha256"
        digest = f"{kind}:{hashlib.new(kind, content).hexdigest()}"
        return replace(source, url=f"{url}/{name}", digest=digest), path, asked

    return start


@pytest.fixture
def samples():
    """Return a function that makes samples and labels of the given classes."""

    def make(classes=(0, 1, 2, 3), number=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        y = torch.tensor(classes).repeat(number)[torch.randperm(number * len(classes), generator=generator)][:number]
        return torch.randn(number, 6, generator=generator), y

    return make


@pytest.fixture
def train(quiet):
    """Return a function that fits a module in a plain Trainer, without shuffling, and returns the Trainer."""

    def run(task, callbacks, data, epochs=2, collate=None, ckpt_path=None, **kwargs):
        trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**quiet, **kwargs})
        trainer.fit(task, DataLoader(TensorDataset(*data), batch_size=8, collate_fn=collate), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def by_hand():
    """Return a training loop in plain PyTorch."""

    def run(task, data, loss=None, epochs=2, begin=None, accumulate=1, mix=None):
        optimizer = task.configure_optimizers()
        batches = list(zip(*(part.split(8) for part in data), strict=True))
        task.train()
        for epoch in range(epochs):
            if begin is not None:
                begin(epoch)
            for i, (x, y) in enumerate(batches):
                if mix is not None:
                    x, y = mix(epoch, i, x, y)
                output = task(x)
                value = F.cross_entropy(output, y) if loss is None else loss(output, x, y)
                (value / accumulate).backward()
                if (i + 1) % accumulate == 0 or i + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()

    return run


@pytest.fixture
def parameters_of():
    """Return a function that counts the parameters of a module."""
    return lambda module: sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture
def assert_same():
    """Return a function that asserts that two modules have the same state. By default, differences up to 1e-6 pass."""

    def check(left, right, tolerance=1e-6):
        torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), rtol=0, atol=tolerance)

    return check


@pytest.fixture
def assert_resumes(fit, make_stream, assert_same, tmp_path):
    """Return a function that asserts that a resumed fit is bitwise identical to an uninterrupted fit.

    The check resumes from the middle of an experience and from the end of an experience.
    """

    def kept(trainer):
        server = trainer.strategy.server
        return dict(server.extra_tensors), {client: dict(server.client_store[client]) for client in server.client_store}

    def four_clients():
        return make_stream(num_clients=4, rounds_per_experience=2)

    def check(make_module, method, stream=four_clients, **options):
        whole, saving = make_module(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        options = {"participation": 0.7, "seed": 5, **options}
        trainer = fit(whole, stream(), [method(), saving], trainer_args={"enable_checkpointing": True}, **options)
        for epoch in (1, 2):
            again = make_module(seed=9)
            other = fit(again, stream(), [method()], ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **options)
            assert_same(again, whole, 0)
            torch.testing.assert_close(kept(other), kept(trainer), rtol=0, atol=0)

    return check


@pytest.fixture
def full_disk():
    """Return a context manager in which writes fail beyond a file size in bytes, as on a full disk."""

    @contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture(scope="session")
def browser():
    """Yield Chromium, which `.ci/run` installs. Without Chromium, the test is skipped locally and fails in CI."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("no Chromium")
    assert found, "Expected an installation of Chromium, but found none. Run `apt-get install chromium`."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Return a function that opens a file in the browser with a given width and color scheme.

    The function returns the page, a list of console messages and errors, and a list of requested URLs.
    """
    pages = []

    def open_page(path, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page, said, asked

    yield open_page
    for page in pages:
        page.close()
