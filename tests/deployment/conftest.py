"""Fixtures that simulate a recipe and deploy it. The client nodes run in this process or on SuperNodes."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
import yaml

from lightning_fcl.deployment.deployment_server import DeploymentConfig, serve
from lightning_fcl.deployment.flower import write_app
from lightning_fcl.deployment.messages import to_record, unpack
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.node_data import write_split
from lightning_fcl.deployment.node_recipe import read_recipe
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.io.checkpoint import newest_checkpoint, read_checkpoint
from lightning_fcl.runs.federated_cli import FederatedCLI
from lightning_fcl.runs.fit import resolve_recipe, run_cli
from lightning_fcl.runs.recipe import Recipe

from .machines import Machines
from .recipes import classes, strategy

# Without the extra `flower`, no test of this folder can run.
if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*"]

BASE = {
    "seed_everything": 3,
    "trainer": {"accelerator": "cpu", "logger": False, "strategy": strategy()},
    "model": {
        "class_path": "lightning_fcl.Classifier",
        "init_args": {
            "num_classes": 10,
            "model": {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [64, 16, 10]}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.5}},
        },
    },
    "data": {
        "data": "digits",
        "scenario": classes(num_experiences=2, rounds_per_experience=2),
        "partition": {"class_path": "IID", "init_args": {"num_clients": 3}},
        "batch_size": 64,
    },
}


def load(path):
    return torch.load(path, weights_only=True)


def over(base, more):
    """Return `base` updated with `more`. Nested dicts are merged, but a dict with a `class_path` replaces a value."""
    if isinstance(base, dict) and isinstance(more, dict) and "class_path" not in more:
        return {**base, **{name: over(base.get(name), value) for name, value in more.items()}}
    return more


class Wire:
    """A link to nodes in this process. All messages and answers are converted to Flower's records."""

    def __init__(self, nodes):
        self.reached = dict(enumerate(nodes, start=7))
        self.sent = {}
        self.asked = []

    def nodes(self):
        return {number: f"key {number}" for number in self.reached}

    def send(self, parcels, seconds):
        new = {f"message {len(self.sent) + i}": number for i, number in enumerate(parcels)}
        self.sent |= {message: (number, parcels[number]) for message, number in new.items()}
        return new

    def answers(self, messages):
        # The answers are in reverse order, because the result must not depend on the order.
        for message in reversed(messages):
            number, given = self.sent[message]
            if given is None:  # The node has already handled this message.
                continue
            self.sent[message] = number, None
            parcel = unpack(to_record(given))
            self.asked.append((number, parcel))
            yield from ((message, answer) for answer in self.replies(number, parcel))

    def replies(self, number, parcel):
        answer = self.reached[number].answer(parcel)
        if answer is not None:
            yield to_record(answer)


class Rehearsal:
    """A folder with a recipe, its simulation and its deployment."""

    def __init__(self, folder, more=()):
        self.folder, self.earlier = folder, set()
        written = folder / "given.yaml"
        written.write_text(yaml.safe_dump(over(BASE, dict(more))))
        self.path = folder / "recipe.yaml"
        self.path.write_text(yaml.safe_dump(resolve_recipe(Recipe((written,)))))
        self.recipe = read_recipe(self.path)

    def simulate(self, *words):
        """Simulate the recipe, write the data of its clients and of the server to files, and return the fit."""
        self.simulated = run_cli(
            "fit",
            Recipe.from_words(["--config", str(self.path), "--out", str(self.folder / "simulated"), *words]),
            FederatedCLI,
        )
        self.split()
        return self.simulated

    def split(self):
        if not (self.folder / "data").exists():
            stream = self.simulated.datamodule
            self.clients = list(stream.plan.clients)
            write_split(stream, self.folder / "data")

    def node(self, client, recipe=None):
        """Return a node of a client. All nodes store their states in one folder, as nodes of one machine do."""
        data = self.folder / "data" / f"{client}.npz"
        return Node(recipe or self.recipe, client, str(data), self.folder / "memories")

    def nodes(self):
        """Return a node for each client."""
        return [self.node(client) for client in self.clients]

    def app(self):
        """Write the recipe as a Flower app, and return the folder of the app."""
        write_app(self.recipe, self.folder / "app", "rehearsal")
        return self.folder / "app"

    def settings(self):
        """Return the run configuration for Flower: results folder, test data of the server, and client names."""
        data = str(self.folder / "data" / "server.npz")
        return {"out": str(self.folder / "deployed"), "data": data, "clients": ",".join(self.clients)}

    def config(self, client):
        """Return Flower's node configuration for a client: name, data file and folder of the client state."""
        data, memories = self.folder / "data" / f"{client}.npz", self.folder / "memories"
        return f'client="{client}" data="{data}" state-dir="{memories}"'

    def weights(self):
        """Return the weights in the server's newest checkpoint."""
        return read_checkpoint(load, newest_checkpoint(self.folder / "deployed" / "checkpoints"))["state_dict"]

    def rounds(self, of="deployed"):
        """Return the record of each round of the deployment or of the simulation."""
        return read_results(self.folder / of)["record"]["rounds"]

    def anew(self):
        """Delete the results and client states of the last run, so that a new run can start."""
        self.earlier |= {path.name for path in (self.folder / "memories").glob("*")}
        for name in ("deployed", "memories"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def ended(self):
        """Return whether the server has finished. The server writes the file `files.txt` last."""
        return (self.folder / "deployed" / "files.txt").exists()

    def memory(self, client):
        """Return the folder of a client's state in this run, or None. Folders of earlier runs are ignored."""
        own = (self.folder / "memories").glob(f"*/{client}")
        return next((folder for folder in own if folder.parent.name not in self.earlier), None)

    def begun(self, client):
        """Return the number of the latest round that the client has started, or -1 before the first round."""
        folder = self.memory(client)
        begun = folder is not None and (folder / "round.json").exists()
        return json.loads((folder / "round.json").read_text())["round"] if begun else -1

    def holds(self, module):
        """Return whether the state of a module is bitwise identical to the server's newest checkpoint."""
        weights = self.weights()
        return all(torch.equal(value, weights[name]) for name, value in state_tensors(module).items())

    def serve(self, link, data="server", **terms):
        """Run the server of a deployment on the nodes of a link. Return the fit."""
        where = str(self.folder / "data" / "server.npz") if data == "server" else data
        terms = DeploymentConfig(**{"join_timeout": 1, "round_timeout": 30, **terms})
        return serve(self.path, link, self.folder / "deployed", terms, where, self.clients if where else ())


@pytest.fixture
def rehearsal(tmp_path):
    """Return a function that makes a `Rehearsal` of a recipe."""
    return lambda more=(): Rehearsal(tmp_path, more)


@pytest.fixture
def wire():
    """Return the class of a link to nodes in this process."""
    return Wire


@pytest.fixture
def same():
    """Return a function that returns whether two modules are bitwise identical."""

    def equal(one, other):
        a, b = state_tensors(one), state_tensors(other)
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    return equal


@pytest.fixture
def machines(tmp_path):
    """Return a function that makes `Machines`, whose processes end with the test."""
    made = []

    def make(*words, **options):
        made.append(Machines(tmp_path, *words, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def connect(tmp_path_factory):
    """Return a function that simulates a recipe, and starts a SuperLink with a SuperNode for each client.

    The function returns the recipe, the fit of the simulation, and the `Machines`.
    """
    made = []

    def connected(recipe, beat):
        folder = tmp_path_factory.mktemp("connected")
        one, at = Rehearsal(folder, recipe), Machines(folder)
        made.append(at)
        at.hasten(beat)
        simulated = one.simulate()
        at.link()
        for client in one.clients:
            at.node(client, one.config(client))
        return one, simulated, at

    yield connected
    for one in made:
        one.close()
