"""One data set for each client."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.data.split import Split


def site(number, samples):
    return TensorDataset(torch.full((samples, 3), float(number)), torch.rand(samples, 1))


class Site(L.LightningDataModule):
    def __init__(self, data):
        super().__init__()
        self.own = data

    def train_dataloader(self):
        return DataLoader(self.own)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("kind", [lambda data: data, Site])
@pytest.mark.parametrize("names", [("site-b", "site-a"), None])
def test_each_client_has_its_own_samples(kind, names):
    sets = [kind(site(1, 6)), kind(site(2, 9))]
    data = sets if names is None else dict(zip(names, sets, strict=True))
    stream = FederatedStream(data, Stationary(rounds=3), split=Split(1 / 3))
    stream.setup("fit")
    assert stream.plan.rounds == 3 and len(stream.plan.test) == 5
    assert sorted(stream.plan.clients) == sorted(names or ("0", "1"))
    for number, client in enumerate(names or ("0", "1"), start=1):
        for round in range(3):
            x, _ = stream.client_samples(client, round, 0)
            assert x.unique().tolist() == [number]
    assert sum(map(len, stream.plan.train[0].values())) == 10


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"train": site(1, 6), "test": site(2, 6)}, ValueError, "named by clients but got test, train, which are spl"),
        ({"a": Endless()}, TypeError, "Expected a map-style data set for client a but got a Endless. Make one of it"),
        ({}, ValueError, "Expected `data` to have a data set for each client but got none."),
    ],
)
def test_what_is_no_data_set_of_a_client_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        FederatedStream(data, Stationary()).setup("fit")


def test_double_precision_becomes_single():
    x = np.random.default_rng(0).normal(size=(20, 3))
    stream = FederatedStream.from_arrays(x, np.arange(20) % 2, scenario=Stationary(2), client=np.arange(20) % 4)
    stream.setup("fit")
    assert stream.samples.x.dtype == torch.float32
    assert torch.equal(stream.samples.x, torch.from_numpy(x).float()) and stream.plan.rounds == 2


def test_rounds_are_counted_from_one():
    with pytest.raises(ValueError, match=r"^Expected `rounds` to be between 1 and 1000000 but got 0\."):
        Stationary(rounds=0)
