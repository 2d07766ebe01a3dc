"""Table of hints in error messages about data."""

from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from fixes import Row, pairs, stream_of, stream_of_data
from torch import nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler

from lightning_fcl.data.datasets.arrays import ArrayDataset, Measurement, check_scale
from lightning_fcl.data.datasets.faces import _with_enough
from lightning_fcl.data.datasets.images import check_faces
from lightning_fcl.data.datasets.readers import check_subset
from lightning_fcl.data.feature_cache import _backbone
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import DomainIncremental, FedViTScenario
from lightning_fcl.data.scenarios.papers import ODFCLScenario
from lightning_fcl.data.split import Split
from lightning_fcl.errors import MissingValueError
from lightning_fcl.models import MLP

ROWS: dict[str, Row] = {}
SECONDS: set[str] = set()


def arrays(lab, **options):
    columns = {"x": np.ones((4, 6), np.float32), "y": np.arange(4), "client_ids": None, "classes": ("a", "b", "c", "d")}
    return ArrayDataset(**{**columns, **options})


SENSOR = {
    "shape": (3, 2),
    "axes": ("time", "channel"),
    "channels": ("x", "y"),
    "units": ("g", "g"),
    "sampling_rate_hz": 50.0,
    "low": (-2.0, -2.0),
    "high": (2.0, 2.0),
    "scaled_over": "sample",
}


def prepare(lab, x=None, of=None, **options):
    x = np.random.default_rng(0).uniform(-1, 1, (4, 3, 2)) if x is None else x
    assert np.isfinite(Measurement(**{**SENSOR, **(of or {})}).preprocess(x, **options)).all()


SERIES = np.random.default_rng(0).uniform(-1, 1, (4, 3, 2))


class Weighted(Sampler):
    """A sampler that draws random samples in each epoch."""

    def __iter__(self):
        return iter(torch.randint(24, (24,)).tolist())

    def __len__(self):
        return 24


class Loaders(L.LightningDataModule):
    """A data module whose training loader comes from a given function."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make(pairs())

    def test_dataloader(self):
        return DataLoader(pairs(8), batch_size=8)


def loaders_of(lab, make):
    return stream_of_data(lab, Loaders(make), partition=IID(2))


ROWS |= {
    "arrays without samples": Row(
        arrays,
        {"x": np.ones((0, 6), np.float32), "y": np.arange(0)},
        {"x": np.ones((4, 6), np.float32), "y": np.arange(4)},
        "Pass at least one sample.",
    ),
    "arrays with a client for some samples": Row(
        arrays, {"client_ids": np.arange(3)}, {"client_ids": np.arange(4)}, "Pass one entry for each sample."
    ),
    "arrays with clients of a floating type": Row(
        arrays,
        {"client_ids": np.ones(4)},
        {"client_ids": np.ones(4).astype("str")},
        "Convert `client_ids` with `client_ids.astype(str)`.",
    ),
    "arrays of a floating type": Row(
        arrays,
        {"x": np.ones((4, 6))},
        {"x": np.ones((4, 6)).astype("float32")},
        "Convert `x` with `x.astype('float32')`.",
    ),
    "scale without a deviation": Row(
        lambda lab, mean, std: check_scale(mean, std, (3, 8, 8)),
        {"mean": np.ones(()), "std": None},
        {"std": np.ones(())},
        "Pass both, or neither.",
        MissingValueError,
    ),
    "scale of another shape": Row(
        lambda lab, mean: check_scale(mean, np.ones((3, 1, 1)), (3, 8, 8)),
        {"mean": np.ones(3)},
        {"mean": np.ones((3, 1, 1))},
        "For one value per channel of images, pass finite values of shape (3, 1, 1).",
    ),
    "series of text": Row(
        prepare,
        {"x": SERIES.astype(str)},
        {"x": SERIES.astype(str).astype("float32")},
        "Convert `x` to a numeric dtype, such as `x.astype('float32')`.",
    ),
    "series with channels first": Row(
        prepare, {"x": SERIES.transpose(0, 2, 1)}, {"x": SERIES}, "Transpose or reshape `x` to this shape."
    ),
    "series of another rate": Row(
        prepare, {"sampling_rate_hz": 25.0}, {"sampling_rate_hz": 50.0}, "Resample the series."
    ),
    "series in other units": Row(prepare, {"units": "m/s2"}, {"units": "g"}, "Convert the values to these units."),
    "series that is NaN": Row(
        prepare,
        {"x": np.where(np.arange(4)[:, None, None] == 1, np.nan, SERIES)},
        {"x": SERIES[2:]},
        "Correct or drop the samples with these values.",
    ),
    "series beyond the range": Row(prepare, {"x": SERIES * 9.81}, {"x": SERIES * 9.81 / 9.81}, "Convert `x` to g."),
    "series of one sample of a person": Row(
        prepare,
        {"x": SERIES[:1], "of": {"scaled_over": "person"}},
        {"x": SERIES},
        "Pass all samples of the person together.",
    ),
    "people with many images": Row(
        lambda lab, least: _with_enough(np.array(["a", "a", "b"]), least, Path("lfw.npz")),
        {"least": 3},
        {"least": 2},
        "Pass a smaller number.",
    ),
    "names of devices as text": Row(
        lambda lab, given: check_subset("devices", given, ["nexus4", "s3"]),
        {"given": "s3"},
        {"given": ["s3"]},
        "Pass a list of at least one of these names, each at most once.",
    ),
    "size of images of faces": Row(
        lambda lab, size: check_faces(size), {"size": 64}, {"size": (64, 48)}, "Pass, for example, (64, 48)."
    ),
    "features of a module without embed": Row(
        lambda lab, network: _backbone(network),
        {"network": nn.Linear(6, 4)},
        {"network": MLP([6, 5, 4])},
        "Define `embed(x)`, which returns the features of images, shape (batch, features).",
    ),
    "group without a name for each sample": Row(
        stream_of,
        {"scenario": DomainIncremental(), "group": np.array([None, *["a"] * 47], dtype=object)},
        {"group": np.array([*["b"] * 24, *["a"] * 24])},
        "Pass an integer for every sample in `group`, or a string for every sample.",
    ),
    "order of domains of all clients and of each": Row(
        lambda lab, **options: DomainIncremental(**options),
        {"domain_order": ["a", "b"], "order_per_client": True},
        {"order_per_client": False},
        "Remove `domain_order` or `order_per_client`.",
    ),
    "people of a base session": Row(
        lambda lab, people: ODFCLScenario(num_people=people, num_base_people=4, num_sessions=2),
        {"people": 9},
        {"people": 8},
        "plus a multiple of `num_sessions`.",
    ),
    "share of few samples": Row(
        lambda lab, share: stream_of(
            scenario=FedViTScenario(2, 2, classes_per_client=(2, 2), sample_fraction=share, rounds_per_task=1),
            client_ids=None,
        ),
        {"share": (0.01, 0.5)},
        {"share": (0.4, 0.5)},
        "Raise `sample_fraction`.",
    ),
    "test client that does not exist": Row(
        stream_of,
        {"split": Split(test=["9"])},
        {"split": Split(test=0.2)},
        "Remove 9 from `test`.",
    ),
    "loader that is a list": Row(
        loaders_of,
        {"make": lambda data: [*DataLoader(data, batch_size=8)]},
        {"make": lambda data: DataLoader(data, batch_size=8)},
        "Pass the dataset of the loader to `FederatedStream.from_arrays`.",
    ),
    "loader with its own batches": Row(
        loaders_of,
        {"make": lambda data: DataLoader(data, batch_sampler=[[0, 1], [2, 3]])},
        {"make": lambda data: DataLoader(data, batch_size=8)},
        "Set `batch_size` in the loader, and remove its `batch_sampler`.",
    ),
    "loader with a sampler that draws": Row(
        loaders_of,
        {"make": lambda data: DataLoader(data, batch_size=8, sampler=Weighted())},
        {"make": lambda data: DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(24)))},
        "Use `shuffle`, a `SubsetRandomSampler`, or a `Subset` of the dataset.",
    ),
    "client with an empty name": Row(
        stream_of,
        {"client_ids": np.repeat([" ", "b"], 24)},
        {"client_ids": np.repeat(["a", "b"], 24)},
        "Rename the client, or drop these samples.",
    ),
}
