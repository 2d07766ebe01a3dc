"""Tests of pandas DataFrames as samples of a stream."""

import numpy as np
import pandas as pd
import pytest
import torch
from raising import raises

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import Stationary
from lightning_fcl.errors import InvalidTypeError, InvalidValueError

Y = pd.Series(["sick", "well"] * 12)
FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(24, 3)), columns=["a", "b", "c"])


def stream_of(x):
    return FederatedStream.from_arrays(x, Y, scenario=Stationary())


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"d": True},
        {"a": FRAME["a"].astype("Float64"), "d": pd.array([1, 2] * 12, dtype="Int64")},
        {"a": FRAME["a"].astype("Float32"), "d": pd.array([True, False] * 12, dtype="boolean")},
    ],
)
def test_frame_of_numbers_equals_array(columns):
    frame = FRAME.assign(**columns)
    stream = stream_of(frame)
    stream.setup("fit")
    expected = torch.from_numpy(frame.astype("float64").to_numpy()).float()
    torch.testing.assert_close(stream.samples.x, expected)
    assert stream.classes == ("sick", "well")


@pytest.mark.parametrize(
    "values",
    [
        ["m", "f"] * 12,
        pd.Categorical(["m", "f"] * 12),
        pd.Series([1, "f"] * 12, dtype=object),
        pd.Timestamp("2020-01-01"),
        1j,
    ],
)
def test_frame_column_without_numbers_raises_with_name(values):
    with raises(InvalidTypeError, "x", value=["sex"]):
        stream_of(FRAME.assign(sex=values))


@pytest.mark.parametrize("missing", [np.nan, np.inf, pd.NA])
def test_frame_missing_value_raises_with_name(missing):
    frame = FRAME.astype("Float64") if missing is pd.NA else FRAME.copy()
    frame.loc[[3, 7], "b"] = missing
    with pytest.raises(InvalidValueError, match=r"in `b` \(2 of 24 rows"):
        stream_of(frame)


def test_frame_as_data_raises_with_its_own_hint():
    for data in (FRAME, {"site-a": FRAME, "site-b": FRAME}):
        with pytest.raises(InvalidTypeError, match=r"pandas\.concat"):
            FederatedStream(data, Stationary()).setup("fit")
