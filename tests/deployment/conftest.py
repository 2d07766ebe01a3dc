"""A recipe in a folder, its simulation, and the same as a server and nodes in this process, messages as on the wire."""

from importlib.util import find_spec

import pytest
import torch
import yaml

from lightning_fcl.deployment.flower import parcel_of, record_of
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.own_data import write_split
from lightning_fcl.deployment.recipe import read_recipe
from lightning_fcl.deployment.rounds import Terms
from lightning_fcl.deployment.serve import serve
from lightning_fcl.federation.aggregation import entries
from lightning_fcl.running.fit import resolve, run

if find_spec("flwr") is None:  # the extra `flower` is not installed
    collect_ignore_glob = ["test_*"]

BASE = {
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "logger": False,
        "strategy": {"class_path": "lightning_fcl.FederatedStrategy", "init_args": {"cohort_size": 1}},
    },
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
        "scenario": {"class_path": "ClassIncremental", "init_args": {"experiences": 2, "rounds_per_experience": 2}},
        "partition": {"class_path": "IID", "init_args": {"clients": 3}},
        "batch_size": 64,
    },
}


def over(base, more):
    """One recipe over another."""
    if isinstance(base, dict) and isinstance(more, dict) and "class_path" not in more:
        return {**base, **{name: over(base.get(name), value) for name, value in more.items()}}
    return more


class Wire:
    """Nodes in this process: what they are sent, and what they answer, goes through Flower's records."""

    def __init__(self, nodes, limit=10**8):
        self.reached = dict(enumerate(nodes, start=7))
        self.limit = limit
        self.asked = []

    def nodes(self):
        return list(self.reached)

    def ask(self, parcels, seconds, longest, enough):
        for number in reversed(parcels):  # in no order that anything may hang on
            parcel = parcel_of(record_of(parcels[number]))
            self.asked.append((number, parcel))
            answer = self.reached[number].answer(parcel)
            if answer is not None:
                yield number, parcel_of(record_of(answer), self.limit)


class Rehearsal:
    """A recipe, its simulation and its deployment, in a folder."""

    def __init__(self, folder, more=()):
        self.folder = folder
        written = folder / "given.yaml"
        written.write_text(yaml.safe_dump(over(BASE, dict(more))))
        self.path = folder / "recipe.yaml"
        self.path.write_text(yaml.safe_dump(resolve(["fit", "--config", str(written)])))
        self.recipe = read_recipe(self.path)

    def simulate(self, *words):
        """The simulation; the shares of its clients are then in files."""
        self.simulated = run(["fit", "--config", str(self.path), "--out", str(self.folder / "simulated"), *words])
        self.split()
        return self.simulated

    def split(self):
        if not (self.folder / "data").exists():
            stream = self.simulated.datamodule
            self.clients = list(stream.plan.clients)
            write_split(stream, self.folder / "data")

    def node(self, client, recipe=None):
        data, memories = self.folder / "data" / f"{client}.npz", self.folder / "memories" / client
        return Node(recipe or self.recipe, client, str(data), memories)

    def serve(self, link, data="server", **terms):
        where = str(self.folder / "data" / "server.npz") if data == "server" else None
        terms = Terms(**{"join_seconds": 1, "round_seconds": 30, **terms})
        return serve(self.path, link, self.folder / "deployed", terms, where, self.clients if where else ())


@pytest.fixture
def rehearsal(tmp_path):
    """Makes a rehearsal of a recipe."""
    return lambda more=(): Rehearsal(tmp_path, more)


@pytest.fixture
def wire():
    """Makes a link to nodes in this process."""
    return Wire


@pytest.fixture
def same():
    """Whether two modules hold the same bits."""

    def equal(one, other):
        a, b = entries(one), entries(other)
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    return equal
