"""Tests that the real sensor datasets have the published numbers of samples, labels and clients."""

import numpy as np
import pytest

from lightning_fcl.data.datasets import load_dataset

KNOWN = {
    "hhar": ("phone windows", (4436, 128, 3), [854, 630, 733, 736, 648, 835], list("abcdefghi")),
    "ucihar": (None, (10299, 6, 128), [1722, 1544, 1406, 1777, 1906, 1944], list(range(1, 31))),
    "wesad": ("wrist streams", (44958, 32, 6), [17611, 9966, 5575, 11806], [*range(2, 12), *range(13, 18)]),
}


@pytest.mark.seconds
@pytest.mark.data
@pytest.mark.parametrize("name", KNOWN)
def test_load_dataset_real_data_has_known_counts(real, name):
    layout, shape, labels, clients = KNOWN[name]
    data = load_dataset(name, real(name, layout))
    assert data.x.shape == shape
    assert np.bincount(data.y).tolist() == labels
    assert np.unique(data.client_ids).tolist() == clients
