"""Table of hints in error messages about deployments, recipes and published models."""

import http.server
import io
import socket
import threading
from contextlib import redirect_stdout
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import torch
from fixes_files import Row, command, fit_words, recipe, written

from lightning_fcl import FederatedStream, callbacks
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.deployment.clock import check_clock
from lightning_fcl.deployment.deployment_server import check_deployable
from lightning_fcl.deployment.flower import _read_node_config
from lightning_fcl.deployment.messages import Parcel, RejectedMessageError, check_records, to_record
from lightning_fcl.deployment.node_data import (
    DataSource,
    NodeData,
    read_data,
    set_node_data,
    set_server_data,
    write_split,
)
from lightning_fcl.deployment.node_recipe import make_outline
from lightning_fcl.errors import (
    ConnectionFailedError,
    MissingValueError,
    UnknownNameError,
)
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.synchronization import Participation
from lightning_fcl.federation.uploads import Stage, UploadTransform
from lightning_fcl.runs.paper_rows import find_recipe, recipes_folder
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.zoo.registry import get_entry

ROWS: dict[str, Row] = {}


# Rows about deployments


class Dateless(http.server.BaseHTTPRequestHandler):
    """A server that answers requests without a `Date` header."""

    def do_GET(self):
        self.send_response_only(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def compare_clocks(lab, at):
    """Compare the local clock with the clock of a server.

    ``at`` is an address, or the name of a server that this function starts.
    """
    if at == "dateless":
        with http.server.HTTPServer(("127.0.0.1", 0), Dateless) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            return check_clock(f"127.0.0.1:{server.server_port}", insecure=True)
    if at == "there":
        at = lab.serve(lab.folder)[0].removeprefix("http://")
    return check_clock(at, insecure=True)


def configure(lab, **node):
    return _read_node_config(SimpleNamespace(node_config=node, run_config={}))


def check_size(lab, limit):
    """Check a message with 1000 float32 values (4000 bytes) against a limit in bytes."""
    check_records(to_record(Parcel({}, {"w": torch.ones(1000)})), limit)


def take_targets(lab, server, node, classes=None):
    """Set the data of a node to samples with the targets `node`.

    The samples of the server have the targets `server`, which are classes or numbers.
    """
    x, columns = np.zeros((4, 1), np.float32), {"target": ["y"], "features": ["a"]}
    outline = make_outline(set_up(FederatedStream.from_arrays(x, server, ["a"] * 4, scenario=Stationary())), "a")
    file = written(lab, "a.csv", "\n".join(["a,y", *(f"0,{value}" for value in node)]))
    source = DataSource(str(file), columns).with_recipe({"data": {"classes": classes}})
    set_node_data(FederatedStream(scenario=Stationary()), read_data(source), outline)


def set_up(stream):
    stream.setup("fit")
    return stream


def take_parts(lab, parts):
    """Give a server samples with the values `parts` in the array `part`."""
    path = lab.folder / "server.npz"
    np.savez(path, x=np.zeros((4, 6), np.float32), y=np.array(["a", "b"] * 2), part=np.array(parts))
    set_server_data(FederatedStream(scenario=Stationary()), read_data(path, for_server=True), ["a"])


MODULES = """
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Pairs(torch.utils.data.Dataset):
    '''Samples of two tensors.'''
    def __init__(self, first):
        self.first = first
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index >= 8:
            raise IndexError
        return {"a": torch.full((2,), float(self.first + index)), "b": torch.zeros(3)}, index % 2

class Loads(L.LightningDataModule):
    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs
    def samples(self, first):
        return Pairs(first) if self.pairs else TensorDataset(first + torch.arange(16.0).view(8, 2), torch.arange(8) % 2)
    def train_dataloader(self):
        return DataLoader(self.samples(0), batch_size=4)
    def test_dataloader(self):
        return DataLoader(self.samples(100), batch_size=4)
"""


def loads(lab, pairs):
    written(lab, "fixes_modules.py", MODULES)
    lab.env.syspath_prepend(str(lab.folder))
    return "fixes_modules:Loads", {"pairs": pairs}


def split_modules(lab, pairs=False, **loading):
    """Write the samples of two clients' data modules to files."""
    name, arguments = loads(lab, pairs)
    data = {client: resolve_name(name)(**arguments) for client in "ab"}
    return write_split(FederatedStream(data, Stationary(), **loading), lab.folder / "shares")


def share_pairs(lab, module):
    """Read a node's samples, which have two input tensors, from a data module.

    If ``module`` is false, write the samples to files instead.
    """
    if not module:
        return split_modules(lab, True, batch_size=4, shuffle=True, drop_last=False)
    data = read_data(DataSource(*loads(lab, True)[:1], init_args={"pairs": True}))
    assert isinstance(data, NodeData) and len(data.samples) == 8
    return data


def train_method(lab, deployed):
    """Train with a method that only a simulation supports.

    If ``deployed`` is true, check the method for a deployment instead.
    """
    if deployed:
        check_deployable(Participation(), Pipeline(), [callbacks.FedCBDR()])
    else:
        fit_words(lab, "--trainer.callbacks+ lightning_fcl.callbacks.FedCBDR")


class Sums(UploadTransform):
    """An upload transform with which the server receives only sums."""

    stage = Stage.MASK
    sums_only = True


def mask_uploads(lab, deployed):
    """Use an upload transform with which the server receives only sums, in a deployment or in a simulation."""
    pipeline = Pipeline([Sums()])
    if deployed:
        check_deployable(Participation(), pipeline, [])
    assert pipeline.mask is not None


ROWS |= {
    "a mask in a deployment": Row(
        mask_uploads,
        {"deployed": True},
        {"deployed": False},
        "Use `lightning-fcl fit` to simulate the federation.",
        argument="upload_transforms",
    ),
    "SuperLink without a port": Row(
        compare_clocks, {"at": "127.0.0.1"}, {"at": "there"}, "Give the address as `host:port`", argument="superlink"
    ),
    "SuperLink that does not run": Row(
        compare_clocks,
        {"at": f"127.0.0.1:{closed_port()}"},
        {"at": "there"},
        "or correct `--superlink`, `--insecure` and `--root-certificates`",
        ConnectionFailedError,
    ),
    "program without a clock": Row(
        compare_clocks, {"at": "dateless"}, {"at": "there"}, "Correct `--superlink`.", ConnectionFailedError
    ),
    "node without a client": Row(
        configure,
        {},
        {"client": "a", "data": "a.npz"},
        """--node-config 'client="a" data="a.npz"'.""",
        RejectedMessageError,
        "client",
    ),
    "message above the limit": Row(
        check_size,
        {"limit": 3999},
        {"limit": 5000},
        "set `max-message-bytes` to at least",
        RejectedMessageError,
    ),
    "classes on a node, numbers on the server": Row(
        take_targets,
        {"server": np.ones(4, np.float32), "node": [1, 2, 1, 2]},
        {"classes": []},
        "Write `classes: []` below `data` of the recipe",
        RejectedMessageError,
        "target",
    ),
    "numbers on a node, classes on the server": Row(
        take_targets,
        {"server": np.array(["p", "q"] * 2), "node": [0.5, 1.5, 0.5, 1.5]},
        {"node": ["p", "q", "p", "q"]},
        "Name the column of the classes in `target`, or write the names of classes as targets",
        RejectedMessageError,
        "target",
    ),
    "server without test samples": Row(
        take_parts,
        {"parts": ["validation"] * 4},
        {"parts": ["test", "validation"] * 2},
        'Write "test" as `part` of some samples',
        MissingValueError,
        "data",
    ),
    "split without a setting of loaders": Row(
        split_modules,
        {"batch_size": 4, "drop_last": False},
        {"shuffle": False},
        "Write `shuffle: false`.",
    ),
    "split of samples that are not arrays": Row(
        share_pairs, {"module": False}, {"module": True}, "Give each node a DataModule instead"
    ),
    "method that cannot be deployed": Row(
        train_method, {"deployed": True}, {"deployed": False}, "Use `lightning-fcl fit` for this method"
    ),
}


# Rows about recipes


def listed_name(lab, words):
    """Return the first word that a command prints."""
    with redirect_stdout(io.StringIO()) as printed:
        command(lab, words)
    return printed.getvalue().split()[0]


def import_model(lab, text):
    """Read a recipe whose model is in a user-defined module."""
    written(lab, "fixes_own_module.py", text)
    lab.env.syspath_prepend(str(lab.folder))
    return recipe(lab, "--model fixes_own_module.Mine")


def quickstart_model():
    return Recipe((recipes_folder() / "quickstart.yaml",)).content()["model"]


def follow_file(lab, content):
    """Read a recipe whose model is in another file with the given content."""
    written(lab, "model.yaml", content)
    return recipe(lab, files=["model: model.yaml"])


def name_file(lab, name):
    """Read a recipe in the folder `recipes` with a model file in the folder `models`."""
    written(lab, "models/model.yaml", quickstart_model())
    return recipe(lab, f"--config {written(lab, 'recipes/r.yaml', {'model': name})}")


def fit_alone(lab, name):
    """Fit for one round. `name` is a recipe, or a settings file without a recipe."""
    written(lab, "settings.yaml", {"trainer": {"enable_progress_bar": False, "max_epochs": 1}})
    command(lab, f"fit {name} --config settings.yaml --data.partition IID --data.partition.num_clients 2 --out out")


ROWS |= {
    "recipe without a model": Row(
        fit_alone,
        {"name": ""},
        {"name": "quickstart"},
        "Pass a recipe with a model, as in `lightning-fcl fit quickstart`",
        MissingValueError,
        "model",
    ),
    "module that raises an error": Row(
        import_model,
        {"text": "from lightning_fcl import Classifier as Mine\n1 / 0"},
        {"text": "from lightning_fcl import Classifier as Mine"},
        'Correct fixes_own_module until `python -c "import fixes_own_module"` works.',
        argument="model",
    ),
    "files that name each other": Row(
        follow_file, {"content": "model.yaml"}, {"content": quickstart_model()}, "in place of the file name"
    ),
    "file of the working directory": Row(
        name_file,
        {"name": "models/model.yaml"},
        {"name": "../models/model.yaml"},
        "Write ../models/model.yaml: file names are relative to the folder of",
    ),
    "unknown recipe, name from the list": Row(
        lambda lab, name=None: find_recipe(name or listed_name(lab, "ls recipes")),
        {"name": "zzz"},
        {"name": None},
        "List all names with `lightning-fcl ls recipes`.",
        UnknownNameError,
    ),
}


def with_damaged_optimizer(lab):
    """Write a checkpoint whose optimizer has no parameter groups."""
    path = lab.checkpoint()
    content = torch.load(path, weights_only=True)
    torch.save({**content, "optimizer_states": [{}]}, path.with_name("changed.ckpt"))


ROWS |= {
    "checkpoint that cannot be restored": Row(
        fit_words,
        {
            "words": "--ckpt_path run/checkpoints/changed.ckpt --trainer.max_epochs 2",
            "prepare": with_damaged_optimizer,
        },
        {"words": "--trainer.max_epochs 2"},
        "Use another checkpoint, or remove `ckpt_path`.",
        argument="ckpt_path",
    ),
}


# Rows of the table of hints: published models

ROWS |= {
    "unknown model, name from the list": Row(
        lambda lab, name: get_entry(name or listed_name(lab, "zoo ls")),
        {"name": "zzz"},
        {"name": None},
        "List all names with `lightning-fcl zoo ls`.",
        UnknownNameError,
        "name",
    ),
}

SECONDS = {train_method, fit_alone}
"""Functions that take at least 0.5 s."""
