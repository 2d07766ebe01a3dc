"""Tests of the HHAR loader: it aligns the two sensors of each device on one time grid and reports damaged files."""

import re

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.datasets import hhar
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import MissingFileError

HEADER = "Index,Arrival_Time,Creation_Time,x,y,z,User,Model,Device,gt"
# Start time in nanoseconds since 1970. A float cannot represent this number exactly.
START = 1424696631913248572
FILES = [f"{kind}_{sensor}" for kind in ("Phones", "Watch") for sensor in ("accelerometer", "gyroscope")]


def row(seconds, xyz, user="a", model="nexus4", device=None, gt="sit"):
    # `Arrival_Time` is in ms, and its clock differs from the clock of `Creation_Time`.
    time = START + round(seconds * 1e9)
    numbers = ",".join(repr(float(v)) for v in xyz)
    return f"0,{time // 1_000_000 + 1995},{time},{numbers},{user},{model},{device or model + '_1'},{gt}"


def line_signal(t, sensor):
    """Return a linear signal, which linear interpolation reproduces exactly."""
    return np.array([1 + 2 * t, -3 * t, 0.5 * t]) * (10 if sensor == "gyroscope" else 1)


def recording(sensor, begin=0.0, end=5.0, step=0.005, **owner):
    times = np.arange(begin, end + step / 2, step)
    return [row(t, line_signal(t, sensor), **owner) for t in times]


def put(root, place="hhar/Activity recognition exp", **files):
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        rows = files.get(name, [])
        if rows is not None:
            text = rows if isinstance(rows, str) else "\n".join([HEADER, *rows]) + "\n"
            (folder / f"{name}.csv").write_text(text)
    return folder


def both(**owner):
    return {f"Phones_{s}": recording(s, **owner) for s in ("accelerometer", "gyroscope")}


@pytest.mark.parametrize(
    "place", ["hhar/Activity recognition exp", "Activity recognition exp", "hhar", ""], ids=["a", "b", "c", "root"]
)
def test_load_hhar_interpolates_to_regular_grid(tmp_path, place):
    acc = recording("accelerometer", step=0.005)
    gyro = recording("gyroscope", begin=0.1234, end=4.9, step=0.0071)
    folder = put(tmp_path, place, Phones_accelerometer=acc[::-1] + acc[:50], Phones_gyroscope=gyro)
    data = hhar.load_hhar(tmp_path, chunk=100, normalize="none")
    t = 0.1234 + np.arange(400) / 100
    wanted = np.concatenate([line_signal(t, s).T for s in ("accelerometer", "gyroscope")], axis=1).reshape(4, 100, 6)
    np.testing.assert_allclose(data.x, wanted, rtol=1e-4, atol=1e-4)
    assert data.y.tolist() == [1] * 4
    assert SOURCES["hhar"].find(tmp_path) == ("CSV files", folder)
    assert SOURCES["hhar"].download(tmp_path) == folder


def test_load_hhar_chunks_stay_within_gaps_and_activities(tmp_path):
    files = {}
    for sensor in ("accelerometer", "gyroscope"):
        rows = recording(sensor, 0, 2)  # sit, 2 s
        # A pause of 0.4 s is not a gap.
        rows += recording(sensor, 2.4, 4)
        # A pause of 0.6 s is a gap.
        rows += recording(sensor, 4.6, 7.2)
        rows += recording(sensor, 7.205, 8.2, gt="null")
        rows += recording(sensor, 8.205, 9.205, gt="walk")
        rows += recording(sensor, 9.21, 10.21, gt="bike")
        files[f"Phones_{sensor}"] = rows
    put(tmp_path, **files)
    data = hhar.load_hhar(tmp_path, chunk=100, normalize="none")
    starts = [0, 1, 2, 3, 4.6, 5.6, 8.205, 9.21]
    np.testing.assert_allclose((data.x[:, 0, 0] - 1) / 2, starts, atol=1e-4)
    assert data.y.tolist() == [1] * 6 + [5, 0]


def test_load_hhar_sensors_with_unequal_labels_are_dropped(tmp_path):
    files = both()
    files["Phones_gyroscope"] = recording("gyroscope", 0, 2) + recording("gyroscope", 2.005, 5, gt="stand")
    put(tmp_path, **files)
    assert hhar.load_hhar(tmp_path, chunk=100).y.tolist() == [1, 1]


def test_load_hhar_orders_users_devices_and_groups(tmp_path):
    owners = [("b", "s3", "s3_1"), ("a", "s3", "s3_2"), ("a", "nexus4", "nexus4_1"), ("a", "s3", "s3_1")]
    files = {
        f"Phones_{s}": [
            line
            for i, (user, model, device) in enumerate(owners)
            for line in recording(s, i, i + 2, step=0.01, user=user, model=model, device=device)
        ]
        for s in ("accelerometer", "gyroscope")
    }
    files |= {
        f"Watch_{s}": recording(s, 9, 11, step=0.01, user="a", model="lgwatch")
        + recording(s, 9, 11, step=0.01, user="i", model="gear")
        for s in ("accelerometer", "gyroscope")
    }
    put(tmp_path, **files)
    data = hhar.load_hhar(tmp_path, normalize="none")
    assert data.client_ids.tolist() == ["a", "a", "a", "a", "b"]
    assert data.group.tolist() == [0, 1, 1, 3, 1]
    np.testing.assert_allclose((data.x[:, 0, 0] - 1) / 2, [2, 3, 1, 9, 0], atol=1e-4)
    data = hhar.load_hhar(tmp_path, devices=["gear", "s3"], normalize="none")
    assert (data.client_ids.tolist(), data.group.tolist()) == (["a", "a", "b", "i"], [1, 1, 1, 0])
    # The signals of each user and device are normalized separately.
    scaled = hhar.load_hhar(tmp_path)
    np.testing.assert_allclose(scaled.x.mean(axis=1), 0, atol=1e-4)
    np.testing.assert_allclose(scaled.x.std(axis=1), 1, atol=1e-3)
    with pytest.warns(
        UserWarning, match="Left out user c with s3_1 of .*: no stretch of one label has at least 200 time steps"
    ):
        put(tmp_path, **{n: rows + recording(n[7:], 0, 1, user="c", model="s3") for n, rows in files.items()})
        assert len(hhar.load_hhar(tmp_path, devices=["s3"]).y) == 3


def test_load_hhar_phones_only_needs_no_watch_files(tmp_path):
    folder = put(tmp_path, Watch_accelerometer=None, Watch_gyroscope=None, **both())
    assert len(hhar.load_hhar(tmp_path, devices=["nexus4"]).y) == 2
    with raises(MissingFileError, value=folder / "Watch_accelerometer.csv"):
        hhar.load_hhar(tmp_path)


def test_window_statistics_use_newest_complete_window():
    x = np.random.default_rng(0).normal(size=(437, 6)).astype(np.float32)
    found = hhar.window_statistics(x)
    assert found.shape == (238, 32)
    for step in range(199, 437):
        start = (step + 1 - 200) // 100 * 100
        window = x[start : start + 200]
        assert start + 200 <= step + 1 < start + 300
        own = x[step]
        magnitude = [np.sqrt((own[:3] ** 2).sum()), np.sqrt((own[3:] ** 2).sum())]
        wanted = [*own, *magnitude, *window.mean(0), *window.std(0), *window.min(0), *window.max(0)]
        np.testing.assert_allclose(found[step - 199], wanted, rtol=1e-4, atol=1e-5)
    changed = x.copy()
    changed[300:] = 99
    np.testing.assert_array_equal(hhar.window_statistics(changed)[: 300 - 199], found[: 300 - 199])


def test_load_hhar_statistics_equal_window_statistics(tmp_path):
    put(tmp_path, **both())
    data = hhar.load_hhar(tmp_path, chunk=100, features="statistics", normalize="none")
    # 302 of the 501 time steps have a complete window, which gives three chunks of 100 steps.
    assert data.x.shape == (3, 100, 32)
    raw = hhar.load_hhar(tmp_path, chunk=1, normalize="none").x[:, 0]
    np.testing.assert_array_equal(data.x.reshape(-1, 32), hhar.window_statistics(raw)[:300])
    assert np.isfinite(hhar.load_hhar(tmp_path, chunk=100, features="statistics").x).all()


def rows_with(change):
    rows = recording("accelerometer", 0, 3)
    rows[7] = change(rows[7].split(","))
    return {"Phones_accelerometer": rows, "Phones_gyroscope": recording("gyroscope", 0, 3)}


DAMAGES = {
    "no columns": ({"Phones_gyroscope": "a,b\n1,2\n"}, "Phones_gyroscope.csv to contain whole rows of"),
    "a word": (
        rows_with(lambda r: ",".join([*r[:3], "abc", *r[4:]])),
        "Phones_accelerometer.csv to contain whole rows",
    ),
    "infinite": (rows_with(lambda r: ",".join([*r[:4], "inf", *r[5:]])), "as x, y, z of user a with device nexus4_1"),
    "a cut row": (rows_with(lambda r: ",".join(r[:5])), "Phones_accelerometer.csv to contain whole rows of"),
    "a cut label": (rows_with(lambda r: ",".join([*r[:9], "si"])), "'si' as `gt`, which is none of null, bike"),
    "no label": (rows_with(lambda r: ",".join(r[:9])), "'' as `gt`, which is none of null, bike"),
    "a user z": (rows_with(lambda r: ",".join([*r[:6], "z", *r[7:]])), "'z' as `User`, which is none of a, b"),
    "a model": (rows_with(lambda r: ",".join([*r[:7], "s9", *r[8:]])), "'s9' as `Model`, which is none of nexus4"),
    "no time": (rows_with(lambda r: ",".join([*r[:2], "", *r[3:]])), "Phones_accelerometer.csv to contain whole rows"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_hhar_damaged_file_raises_with_path(tmp_path, damage):
    files, message = DAMAGES[damage]
    put(tmp_path, **{**both(), **files})
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        hhar.load_hhar(tmp_path)
    assert "Delete this copy and unpack" in str(caught.value)


def put_windows(root, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "X": rng.normal(size=(3, 3, 128)).astype(np.float32),
        "y": np.array([5, 0, 2]),
        "user": np.array([8, 0, 0]),
    }
    path = root / "hhar_phone" / "windows.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path, arrays["X"]


def test_load_hhar_windows_are_cut_into_chunks(tmp_path):
    path, x = put_windows(tmp_path)
    assert SOURCES["hhar"].find(tmp_path) == ("phone windows", path)
    data = hhar.load_hhar(tmp_path, chunk=32)
    np.testing.assert_array_equal(data.x.reshape(3, 128, 3), x.transpose(0, 2, 1))
    assert data.client_ids.tolist() == ["i"] * 4 + ["a"] * 8
    assert data.y.tolist() == [5] * 4 + [0] * 4 + [2] * 4
    assert data.group is None
    put(tmp_path, **both())
    assert SOURCES["hhar"].find(tmp_path)[0] == "CSV files"


REFUSED = {
    "chunk": ({}, {"chunk": 200}, "Expected `chunk` to divide 128, the time steps of a window in"),
    "devices": ({}, {"devices": ["s3"]}, "Expected `devices` to be None, but got ['s3']. "),
    "features": ({}, {"features": "statistics"}, "Expected `features` to be 'raw', but got 'statistics'. "),
    "normalize": ({}, {"normalize": "none"}, "Expected `normalize` to be 'user', but got 'none'. "),
    "user 9": ({"user": np.array([0, 9, 1])}, {"chunk": 128}, "to be between 0 and 8, but got 9 in sample 1."),
    "label 6": ({"y": np.array([0, 6, 1])}, {"chunk": 128}, "Expected `y` to be between 0 and 5"),
    "not finite": ({"X": np.full((3, 3, 128), np.nan)}, {"chunk": 128}, "Expected `x` to be finite"),
    "chunk 0": (None, {"chunk": 0}, "Expected `chunk` to be at least 1 but got 0."),
    "unknown devices": (
        None,
        {"devices": ["s4"]},
        "Expected `devices` to be a list of different names from nexus4, s3,",
    ),
    "chunk long": (None, {"chunk": 502}, "Expected `chunk` to be at most 501, the time steps of the longest stretch"),
    "none there": (None, {"devices": ["s3"]}, "check that the files contain s3."),
}


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("case", REFUSED)
def test_load_hhar_invalid_windows_or_options_raise(tmp_path, case):
    changes, options, message = REFUSED[case]
    put(tmp_path, **both()) if changes is None else put_windows(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        hhar.load_hhar(tmp_path, **options)
