"""One data set for each client."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.data.split import Split


def site(number, samples):
    return TensorDataset(torch.full((samples, 3), float(number)), torch.rand(samples, 1))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("names", [("site-b", "site-a"), None])
def test_each_client_has_its_own_samples(names):
    sets = site(1, 6), site(2, 9)
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
        (
            {"train": site(1, 6), "test": site(2, 6)},
            ValueError,
            "by clients but got train, test, which are splits",
        ),
        ({"a": Endless()}, TypeError, "Expected a map-style data set for client a but got a Endless. Make one of it"),
        ({}, ValueError, "Expected `data` to have a data set for each client but got none."),
    ],
)
def test_what_is_no_data_set_of_a_client_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        FederatedStream(data, Stationary()).setup("fit")


def test_a_fit_of_a_data_set_a_client_is_one_of_their_owners(fit):
    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            torch.nn.init.zeros_(self.layer.weight), torch.nn.init.zeros_(self.layer.bias)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    sets, own, pooled, options = [site(1, 6), site(2, 9)], Line(), Line(), {"seed": 0, "split": Split(0.0)}
    fit(own, FederatedStream({"a": sets[0], "b": sets[1]}, Stationary(2), **options))
    x, y = (torch.cat(columns) for columns in zip(*(data.tensors for data in sets), strict=True))
    owner = ["a"] * 6 + ["b"] * 9
    fit(pooled, FederatedStream.from_arrays(x, y, owner, scenario=Stationary(2), **options))
    assert own.layer.weight.abs().sum() > 0
    torch.testing.assert_close(dict(own.state_dict()), dict(pooled.state_dict()))


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_a_fit_in_double_precision_has_double_numbers(fit, precision, dtype):
    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            assert batch[0].dtype == batch[1].dtype == dtype
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    x = np.random.default_rng(0).normal(size=(20, 3))
    stream = FederatedStream.from_arrays(x, x[:, :1], np.arange(20) % 4, scenario=Stationary(2), seed=0)
    fit(Line(), stream, max_epochs=2, trainer_args={"precision": precision})
    assert stream.samples.x.dtype == dtype


def test_double_precision_becomes_single():
    x = np.random.default_rng(0).normal(size=(20, 3))
    stream = FederatedStream.from_arrays(x, np.arange(20) % 2, scenario=Stationary(2), client=np.arange(20) % 4)
    stream.setup("fit")
    assert stream.samples.x.dtype == torch.float32
    assert torch.equal(stream.samples.x, torch.from_numpy(x).float()) and stream.plan.rounds == 2


def test_rounds_are_counted_from_one():
    with pytest.raises(ValueError, match=r"^Expected `rounds` to be between 1 and 1000000 but got 0\."):
        Stationary(rounds=0)
