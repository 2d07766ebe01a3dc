"""Tests of the data of nodes and servers. Samples equal those of the simulation. Invalid files raise an error."""

import json
import sys
from dataclasses import asdict, replace
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.deployment.flower import _read_node_config, _source
from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.node_data import (
    DataSource,
    count_samples,
    read_data,
    set_node_data,
    set_server_data,
)
from lightning_fcl.deployment.node_recipe import ClientOutline, make_outline
from lightning_fcl.errors import MissingValueError

from .recipes import strategy

SENSORS = """
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

class Windows(Dataset):
    '''A map-style dataset, which computes its items.'''
    def __init__(self, site, samples):
        self.site, self.samples = site, samples
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        return torch.tensor([1000.0 * self.site + index, index % 7]), index % 4

class Sensors(L.LightningDataModule):
    def __init__(self, site, samples=60):
        super().__init__()
        self.site, self.samples = site, samples
    def setup(self, stage):
        self.parts = random_split(Windows(self.site, self.samples), [0.6, 0.15, 0.25])
    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=8, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=8)
    def test_dataloader(self):
        return DataLoader(self.parts[2], batch_size=8)

class Tests(L.LightningDataModule):
    def test_dataloader(self):
        return DataLoader(Windows(9, 20), batch_size=8)

class Trains(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Windows(9, 20), batch_size=8)
"""


@pytest.fixture(autouse=True)
def sensors(tmp_path, monkeypatch):
    """Write a module with user-defined data modules, which tests can import."""
    (tmp_path / "sensors.py").write_text(SENSORS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("sensors", None)


LABELS = np.array(["sit", "walk", "run", "fall"])
COLUMNS = {"target": ["label"], "features": ["a", "b"]}


def arrays():
    """Return the inputs in single precision, the labels and the owners of the samples of two clients."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(80, 2)).astype(np.float32), LABELS[rng.integers(4, size=80)], np.arange(80) % 2


def write_npz(folder, x, y):
    np.savez(folder / "own.npz", x=x, y=y)
    return DataSource(str(folder / "own.npz"))


def write_csv(folder, x, y, name="own.csv"):
    rows = [f"{label},{float(b)!r},{float(a)!r}" for (a, b), label in zip(x, y, strict=True)]
    (folder / name).write_text("\n".join(["label,b,a", *rows]))
    return DataSource(str(folder / name), COLUMNS)


def write_parquet(folder, x, y):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"b": x[:, 1].astype(np.float64), "a": x[:, 0], "label": y.tolist()})
    parquet.write_table(table, folder / "own.parquet")
    return DataSource(str(folder / "own.parquet"), COLUMNS)


FILES = {"npz": write_npz, "csv": write_csv, "parquet": write_parquet}


def node_of(stream, client, source):
    """Return the stream of a node. The outline from the server is encoded as JSON and decoded."""
    outline = ClientOutline.from_dict(json.loads(json.dumps(asdict(make_outline(stream, client)))))
    node = FederatedStream(seed=stream.seed, batch_size=8)
    set_node_data(node, read_data(source, stream.seed), outline)
    return node


def rounds_of(stream, client):
    """Return the inputs and targets of a client, in training order, by round."""
    there = [number for number in range(stream.plan.num_rounds) if client in stream.plan.train[number]]
    return {number: stream.client_samples(client, number, 0) for number in there}


def check_equal(node, simulated, client):
    """Raise AssertionError unless a client has identical samples in each round of two streams."""
    here, there = rounds_of(node, client), rounds_of(simulated, client)
    assert here.keys() == there.keys() and here
    for number, pair in there.items():
        assert len(pair) == len(here[number]) == 2
        assert all(torch.equal(one, other) for one, other in zip(here[number], pair, strict=True))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("scenario", [ClassIncremental(2, rounds_per_experience=2), Stationary(2)], ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_node_with_file_has_samples_of_simulation(tmp_path, kind, scenario, seed):
    x, y, owner = arrays()
    simulated = FederatedStream.from_arrays(x, y, owner, scenario=scenario, split=Split(test=0.0), seed=seed)
    simulated.setup("fit")
    for client in (0, 1):
        source = FILES[kind](tmp_path, x[owner == client], y[owner == client])
        check_equal(node_of(simulated, str(client), source), simulated, str(client))


def test_node_with_image_folder_has_samples_of_simulation(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(12, 3, 4, 4), dtype=np.uint8), np.array(["cat", "dog"]).repeat(6)
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "photos" / label / f"{number:02d}.png")
    pixels = x.astype(np.float32) / 255
    simulated = FederatedStream.from_arrays(pixels, y, np.zeros(12, int), split=Split(test=0.0), scenario=Stationary())
    simulated.setup("fit")
    check_equal(node_of(simulated, "0", DataSource(str(tmp_path / "photos"))), simulated, "0")


@pytest.mark.parametrize("seed", [0, 3])
def test_node_with_data_module_has_training_samples_of_simulation(seed):
    from sensors import Sensors

    simulated = FederatedStream({"a": Sensors(1), "b": Sensors(2, 80)}, ClassIncremental(2), seed=seed)
    simulated.setup("fit")
    tested = {x[0].item() for x, _ in (simulated.samples.x[int(row)] for row in simulated.plan.test)}
    for client, arguments, samples in (("a", {"site": 1}, 36), ("b", {"site": 2, "samples": 80}, 48)):
        node = node_of(simulated, client, DataSource("sensors:Sensors", init_args=arguments))
        check_equal(node, simulated, client)
        trained = torch.cat([x[:, 0] for x, _ in rounds_of(node, client).values()]).tolist()
        assert len(trained) == len({*trained}) == samples and not tested & {*trained}


@pytest.mark.parametrize("seed", [0, 3])
def test_server_with_data_module_has_test_samples_of_simulation(seed):
    from sensors import Sensors

    simulated = FederatedStream(Sensors(1), ClassIncremental(2), "IID", seed=seed)
    simulated.setup("fit")
    server = FederatedStream(scenario=ClassIncremental(2), seed=seed)
    data = read_data(DataSource("sensors:Sensors", init_args={"site": 1}), seed, for_server=True)
    set_server_data(server, data, ["a", "b"])
    for name, samples in (("test", 15), ("val", 9)):
        here, there = (
            torch.cat([x[:, 0] for x, _ in getattr(one, f"{name}_dataloader")()]) for one in (server, simulated)
        )
        assert len(here) == samples and torch.equal(here, there)
    assert server.plan.clients == ("a", "b") and server.plan.tasks["a"] == simulated.plan.tasks["0"]


def test_server_data_module_without_test_loader_raises():
    server = FederatedStream(scenario=Stationary(2))
    set_server_data(server, read_data("sensors:Tests", for_server=True), ["a"])
    assert len(server.plan.test) == 20 and server.plan.num_rounds == 2
    with pytest.raises(RejectedMessageError, match=r"Define `test_dataloader` in Trains"):
        read_data("sensors:Trains", for_server=True)
    with pytest.raises(RejectedMessageError, match="Define `train_dataloader` in Tests"):
        read_data("sensors:Tests")


def test_count_samples_counts_training_samples(tmp_path):
    source = DataSource("sensors:Sensors", init_args={"site": 1, "samples": 100})
    assert count_samples(source, tmp_path / "note.json") == 60
    longer = replace(source, init_args={"site": 1, "samples": 200})
    assert count_samples(longer, tmp_path / "note.json") == 120


def test_read_data_wrong_module_argument_names_node_config():
    with pytest.raises(RejectedMessageError, match=r"sits.*init_args\.folder=") as caught:
        read_data(DataSource("sensors:Sensors", init_args={"sits": 1}))
    assert caught.value.argument == "data"


def test_node_config_sets_columns_and_arguments():
    """The node config and the run configuration can set columns and arguments. The node config takes precedence."""
    from types import SimpleNamespace

    run = {"target": "label", "features": "a, b", "init_args.window": 5, "data": "server.csv", "clients": ""}
    node = {"client": "x", "data": "own.csv", "features": "c,d", "init_args.folder": "/data"}
    client, source, memories = _read_node_config(SimpleNamespace(node_config=node, run_config=run))
    assert (client, memories) == ("x", None)
    table = {"target": ["label"], "features": ["c", "d"]}
    assert source == DataSource("own.csv", table, {"window": 5, "folder": "/data"})
    assert _source("server.csv", run).table == {"target": ["label"], "features": ["a", "b"]}


def test_recipe_table_sets_columns_classes_and_scale(tmp_path):
    x, y, _ = arrays()
    own = write_csv(tmp_path, x, y)
    given = {**COLUMNS, "mean": [1.0, 2.0], "std": [2.0, 4.0], "path": "elsewhere.csv"}
    table = {"class_path": "lightning_fcl.data.tables.Table", "init_args": given}
    for data in (table, {"a": table}, [table]):
        recipe = {"data": {"data": data, "classes": [*LABELS, "other"]}}
        samples = read_data(DataSource(own.where).with_recipe(recipe)).samples
        assert samples.classes == (*LABELS, "other")
        assert (LABELS[samples.targets] == y).all()
        expected = (x.astype(np.float64) - [1, 2]) / [2, 4]
        assert np.allclose(samples.x.numpy(), expected, rtol=1e-6)
    with pytest.raises(RejectedMessageError, match=r"`target` and `features`.*Set them next to `data`"):
        read_data(own.where)
    assert len(read_data(DataSource(own.where, COLUMNS)).samples) == len(x)


def test_read_data_invalid_part_raises_with_fix(tmp_path):
    x, y, _ = arrays()
    path = tmp_path / "server.npz"
    for word, fix in (("tests", "Did you mean test"), ("TEST", "Did you mean test"), ("train", "Remove the samples")):
        np.savez(path, x=x, y=y, part=np.array(["test"] * 79 + [word]))
        with pytest.raises(
            RejectedMessageError, match=rf'`part` of .*server\.npz .*"{word}" for sample 79\. {fix}'
        ) as caught:
            read_data(path, for_server=True)
        assert caught.value.argument == "part"
    # Follow the hint of the last message: remove sample 79.
    np.savez(path, x=x[:79], y=y[:79], part=np.array(["test"] * 79))
    assert len(read_data(path, for_server=True).samples) == 79
    np.savez(path, x=x, y=y, part=np.array(["test", "validation"] * 40))
    server = FederatedStream(scenario=Stationary())
    set_server_data(server, read_data(path, for_server=True), ["a"])
    assert (len(server.plan.test), len(server.plan.validation)) == (40, 40)
    with pytest.raises(RejectedMessageError, match=r"Set `data` to the file with the training data"):
        read_data(path)
    assert len(read_data(write_npz(tmp_path, x, y)).samples) == len(x)
    np.savez(path, x=x, y=y, part=np.array(["validation"] * 80))
    with pytest.raises(ValueError, match="to have test samples, but got none"):
        set_server_data(server, read_data(path, for_server=True), ["a"])


def test_domain_incremental_without_group_raises(tmp_path):
    x, y, _ = arrays()
    place = np.array(["north", "south"])[(x[:, 0] > 0).astype(int)]
    scenario, path = DomainIncremental(), tmp_path / "own.npz"
    simulated = FederatedStream.from_arrays(x, y, np.zeros(80, int), place, scenario=scenario, split=Split(test=0.0))
    simulated.setup("fit")
    np.savez(path, x=x, y=y, group=place)
    check_equal(node_of(simulated, "0", DataSource(str(path))), simulated, "0")
    server = FederatedStream(scenario=scenario)
    set_server_data(server, read_data(path, for_server=True), ["0"])
    assert server.plan.num_rounds == 2
    for source in (write_npz(tmp_path, x, y), write_csv(tmp_path, x, y)):
        with pytest.raises(ValueError, match=r"data of client 0, .*\.npz file with `group`"):
            node_of(simulated, "0", source)
        with pytest.raises(ValueError, match=r"data of the server, .*\.npz file with `group`"):
            set_server_data(server, read_data(source, for_server=True), ["0"])


@pytest.mark.seconds
def test_serve_invalid_part_sends_no_message(rehearsal, wire):
    one = rehearsal()
    one.simulate()
    path = one.folder / "data" / "server.npz"
    columns = dict(np.load(path))
    np.savez(path, **{**columns, "part": np.char.upper(columns["part"])})
    link = wire(one.nodes())
    with pytest.raises(RejectedMessageError, match=r"`part` of .*server\.npz .*Did you mean test"):
        one.serve(link)
    assert link.sent == {}


X, Y = np.zeros((4, 3), np.float32), np.array(["p", "q"] * 2)
REJECTED = {
    "classes twice": ({"x": X, "y": Y, "classes": np.array(["p", "q", "p"])}, "`classes` .*'p' more than once"),
    "class that UTF-8 cannot encode": ({"x": X, "y": np.array(["p", "\ud800"] * 2)}, r"`classes` .*'\\ud800'"),
    "domain that UTF-8 cannot encode": (
        {"x": X, "y": Y, "group": np.array(["\ud800"] * 4)},
        "`group` .*Rename this entry",
    ),
    "extended precision": ({"x": X.astype(np.longdouble), "y": Y}, r"`x` .*float128.*astype\(numpy\.float32\)"),
    "targets of extended precision": ({"x": X, "y": np.zeros(4, np.longdouble)}, "`y` .*float128"),
    "complex numbers": ({"x": X.astype(np.complex64), "y": Y}, r"`x` .*complex64.*astype\(numpy\.float32\)"),
    "dates": ({"x": X.astype("M8[s]"), "y": Y}, r"`x` .*datetime64.*astype\(numpy\.float32\)"),
    "objects": ({"x": X, "y": Y.astype(object)}, r"objects in y\.npy.*astype\(str\)"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_read_data_invalid_file_raises_with_name(tmp_path, case):
    columns, message = REJECTED[case]
    np.savez(tmp_path / "own.npz", **columns)
    with pytest.raises(RejectedMessageError, match=rf"own\.npz.*{message}"):
        read_data(tmp_path / "own.npz")


@pytest.mark.parametrize("again", ["x.npy", "x"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_read_data_file_with_duplicate_members_raises(tmp_path, again):
    path = tmp_path / "own.npz"
    np.savez(path, x=X, y=Y)
    with ZipFile(path, "a") as archive:
        archive.writestr(again, archive.read("x.npy"))
    with pytest.raises(RejectedMessageError, match=r"own\.npz.*two members with the name 'x'"):
        read_data(path)


def test_read_data_other_byte_order(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.arange(12, dtype=">f4").reshape(4, 3), y=Y)
    assert read_data(tmp_path / "own.npz").samples.x.tolist() == np.arange(12).reshape(4, 3).tolist()


REGRESSION = {
    "trainer": {"strategy": strategy()},
    "model": {
        "class_path": "lightning_fcl.Regressor",
        "init_args": {
            "model": {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [2, 4, 1]}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
}


def write_sites(folder, targets):
    """Write a CSV file for each of three clients and for the server. Return the data of a recipe with these files."""
    rng = np.random.default_rng(1)
    tables = []
    for name, samples in (("0", 30), ("1", 22), ("2", 41), ("server", 24)):
        x = rng.normal(size=(samples, 2)).astype(np.float32)
        path = write_csv(folder, x, targets(x), f"{name}.csv").where
        given = {"path": path, "target": "label", "features": ["a", "b"]}
        tables.append({"class_path": "lightning_fcl.data.tables.Table", "init_args": given})
    return tables


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["numbers", "whole numbers", "labels"])
def test_serve_stationary_with_node_files_equals_simulation(rehearsal, wire, same, tmp_path, kind):
    targets = {
        "numbers": lambda x: (x[:, 0] - x[:, 1]).tolist(),
        "whole numbers": lambda x: np.rint(3 * x[:, 0]).astype(int).tolist(),
        "labels": lambda x: LABELS[(x[:, 0] > 0) + 2 * (x[:, 1] > 0)].tolist(),
    }
    data = {
        "data": write_sites(tmp_path, targets[kind]),
        "scenario": {"class_path": "Stationary", "init_args": {"num_rounds": 2}},
        "partition": None,
        "split": {"test": ["3"]},
        "batch_size": 8,
        "classes": [] if kind == "whole numbers" else None,
    }
    model = {"init_args": {"num_classes": 4, "model": {"init_args": {"sizes": [2, 4, 4]}}}}
    one = rehearsal({**({"model": model} if kind == "labels" else REGRESSION), "data": data})
    # The clients read the CSV files, so the simulation need not write a split.
    one.split = lambda: None
    simulated = one.simulate()
    names, source = ["0", "1", "2"], DataSource(str(tmp_path / "server.csv"))
    nodes = [Node(one.recipe, name, str(tmp_path / f"{name}.csv"), tmp_path / "memories") for name in names]
    one.clients = []
    with pytest.raises(MissingValueError, match=r"Set `clients` in the run configuration, for example clients="):
        one.serve(wire(nodes), source, min_clients=3)
    one.clients = names
    deployed = one.serve(wire(nodes), source, min_clients=3)
    assert same(simulated.model, deployed.model)
    assert deployed.trainer.current_epoch == 2
    assert [each["dropped"] for each in one.rounds()] == [{}, {}]


@pytest.mark.seconds
def test_serve_data_with_single_sample_scenario_raises_with_fix(rehearsal, wire):
    scenario = {"class_path": "FLwFScenario", "init_args": {"samples_per_round": 20, "test_per_class": 10}}
    one = rehearsal({"data": {"scenario": scenario, "partition": None}})
    one.simulate()
    with pytest.raises(ValueError, match=r"`Stationary`, .* but got FLwFScenario.*`lightning-fcl deploy split`"):
        one.serve(wire(one.nodes()))
