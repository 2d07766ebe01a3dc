"""Tests of the warning about non-finite samples after a dropped upload."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import Stationary


class Pairs(Dataset):
    """A dataset of dicts with NumPy arrays."""

    def __init__(self, x, y):
        self.x, self.y = x.numpy(), y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@pytest.mark.parametrize("kind", [TensorDataset, Pairs])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_upload_dropped_for_non_finite_samples_warns_with_sample(fit, make_task, caplog, kind, value):
    x, y = torch.randn(24, 6), torch.arange(24) % 4
    wrong = x.clone()
    wrong[[3, 5], 2] = value
    test = {"test": kind(torch.randn(8, 6), torch.arange(8) % 4)}
    data = {"a": {"train": kind(x, y), **test}, "b": {"train": kind(wrong, y)}}
    trainer = fit(make_task(), FederatedStream(data, Stationary()))
    assert [*trainer.strategy.server.record.dropped] == ["b"]
    message = "2 of 24 training samples of client b have NaN or infinite values, for example sample 3 of its dataset."
    assert caplog.text.count(message) == 1 and "samples of client a" not in caplog.text


def test_upload_dropped_for_other_reasons_does_not_name_samples(fit, make_task, caplog):
    data = {
        "a": TensorDataset(torch.randn(24, 6) * 1e30, torch.arange(24) % 4),
        "b": TensorDataset(torch.randn(24, 6), torch.arange(24) % 4),
    }
    trainer = fit(make_task(), FederatedStream(data, Stationary()), local_epochs=3)
    assert [*trainer.strategy.server.record.dropped] == ["a"]
    assert "dropped the upload of client a" in caplog.text and "NaN or infinite values" not in caplog.text
