"""Tests of the WESAD loader: it reads its three layouts, runs no code from pickles, and reports damaged files."""

import builtins
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.datasets import readers, sensors
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError

SECONDS = 60
RATES = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4}
WIDTHS = {"ACC": 3, "ECG": 1, "EMG": 1, "EDA": 1, "Temp": 1, "Resp": 1}


def signals(seed=0, seconds=SECONDS):
    """Return chest and wrist signals as in the publishers' pickles."""
    rng = np.random.default_rng(seed)
    wrist = {n: rng.normal(size=(seconds * r, 3 if n == "ACC" else 1)) for n, r in RATES.items()}
    wrist["ACC"] = np.clip(np.round(wrist["ACC"] * 40), -128, 127)
    return {"chest": {n: rng.normal(size=(seconds * 700, w)) for n, w in WIDTHS.items()}, "wrist": wrist}


def labels(seconds=SECONDS):
    """Return ten seconds of each label from 0 to 5."""
    return np.repeat(np.arange(6, dtype=np.int32), seconds * 700 // 6)


def put_pickle(root, subject=2, protocol=2, **changes):
    content = {"signal": signals(subject), "label": labels(), "subject": f"S{subject}", **changes}
    path = root / "WESAD" / f"S{subject}" / f"S{subject}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def put_stream(root, subject=2, **changes):
    wrist = signals(subject)["wrist"]
    path = root / "wesad_wrist" / "streams" / f"S{subject}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {n.lower(): wrist[n][:, 0].astype(np.float32) for n in ("BVP", "EDA", "TEMP")}
    arrays |= {"acc": wrist["ACC"].astype(np.int8), "label32": np.repeat(np.arange(6, dtype=np.uint8), 320)}
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path


def at_32(wrist):
    """Return acceleration, pulse, EDA and temperature of the wrist at 32 Hz, computed sample by sample."""
    rows = []
    for i in range(len(wrist["ACC"])):
        pulse = (wrist["BVP"][2 * i, 0] + wrist["BVP"][2 * i + 1, 0]) / 2
        rows.append([*wrist["ACC"][i] / 64, pulse, wrist["EDA"][i // 8, 0], wrist["TEMP"][i // 8, 0]])
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize("layout", ["pickle", "python 3 pickle", "stream"])
def test_load_wesad_wrist_of_pickles_and_streams_is_read(tmp_path, layout):
    for subject in (10, 2):
        put_stream(tmp_path, subject) if layout == "stream" else put_pickle(
            tmp_path, subject, protocol=2 if layout == "pickle" else 4
        )
    data = sensors.load_wesad(tmp_path, chunk=64, normalize="none")
    assert data.client_ids.tolist() == [2] * 20 + [10] * 20
    assert data.y.tolist() == [label for label in range(4) for _ in range(5)] * 2
    for subject in (2, 10):
        wanted = at_32(signals(subject)["wrist"])[320:1600].reshape(20, 64, 6)
        np.testing.assert_allclose(data.x[data.client_ids == subject], wanted, atol=1e-6)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_load_wesad_chest_features_have_order_of_papers(tmp_path, protocol):
    put_pickle(tmp_path, protocol=protocol)
    data = sensors.load_wesad(tmp_path, device="chest", chunk=700, normalize="none")
    chest = np.concatenate([signals(2)["chest"][name] for name in WIDTHS], axis=1)
    np.testing.assert_array_equal(data.x, chest[7000:35000].reshape(40, 700, 8).astype(np.float32))
    assert np.bincount(data.y).tolist() == [10] * 4


def test_load_wesad_incomplete_chunks_are_dropped(tmp_path):
    put_stream(tmp_path)
    data = sensors.load_wesad(tmp_path, chunk=100, normalize="none")
    wanted = at_32(signals(2)["wrist"])
    starts = [320 * label + 100 * k for label in (1, 2, 3, 4) for k in range(3)]
    np.testing.assert_allclose(data.x, np.stack([wanted[s : s + 100] for s in starts]), atol=1e-6)


def test_load_wesad_windows_are_cut_in_time_order(tmp_path):
    windows = np.random.default_rng(0).normal(size=(3, 6, 320)).astype(np.float32)
    np.savez(tmp_path / "windows_10s.npz", X=windows, y=[1, 0, 3], subject=[2, 2, 17], start=[50.0, 10.0, 3.0])
    data = sensors.load_wesad(tmp_path, chunk=160, normalize="none")
    np.testing.assert_array_equal(data.x.reshape(3, 320, 6), windows[[1, 0, 2]].transpose(0, 2, 1))
    assert data.y.tolist() == [0, 0, 1, 1, 3, 3]
    with raises(InvalidValueError, "chunk", value=33):
        sensors.load_wesad(tmp_path, chunk=33)


def test_wesad_source_finds_layouts_in_documented_order(tmp_path):
    np.savez(tmp_path / "windows_10s.npz", X=0)
    assert SOURCES["wesad"].find(tmp_path) == ("wrist windows", tmp_path / "windows_10s.npz")
    put_stream(tmp_path)
    assert SOURCES["wesad"].find(tmp_path) == ("wrist streams", tmp_path / "wesad_wrist" / "streams")
    put_pickle(tmp_path)
    assert SOURCES["wesad"].find(tmp_path) == ("pickles", tmp_path / "WESAD")
    assert SOURCES["wesad"].download(tmp_path) == tmp_path / "WESAD"


def test_load_wesad_subject_without_chunk_warns(tmp_path):
    put_stream(tmp_path, 2)
    put_stream(tmp_path, 3, label32=np.repeat([0, 1] * 120, 8))
    with pytest.warns(
        UserWarning, match="Left out subject 3 of .*streams: no stretch of one label has at least 32 time steps"
    ):
        data = sensors.load_wesad(tmp_path)
    assert data.client_ids.tolist() == [2] * 40
    np.testing.assert_array_equal(data.x, sensors.load_wesad(put_stream(tmp_path / "alone", 2).parents[1]).x)


def test_load_wesad_normalize_user_is_z_score_of_kept_samples(tmp_path):
    put_stream(tmp_path, 2)
    put_stream(tmp_path, 3, temp=np.full(240, 33.3, np.float32))
    data, raw = sensors.load_wesad(tmp_path), sensors.load_wesad(tmp_path, normalize="none")
    for subject in (2, 3):
        flat = raw.x[raw.client_ids == subject].reshape(-1, 6).astype(np.float64)
        std = flat.std(axis=0)
        if subject == 3:
            std[5] = 1
        wanted = (flat - flat.mean(axis=0)) / std
        np.testing.assert_allclose(data.x[data.client_ids == subject].reshape(-1, 6), wanted, atol=1e-5)
    assert abs(data.x[data.client_ids == 3][..., 5]).max() < 1e-5


class Evil:
    """An object whose pickle requests a function call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def mark(path):
    """Create a file, which shows that a pickle has called this function."""
    path.write_text("here")


def object_array(evil):
    array = np.empty(1, dtype=object)
    array[0] = evil
    return array


ATTACKS = {
    "os.system": lambda path: Evil(os.system, f"touch '{path}'"),
    "eval": lambda path: Evil(builtins.eval, f"open({str(path)!r}, 'w')"),
    "our own function": lambda path: Evil(mark, path),
    "in an object array": lambda path: object_array(Evil(os.system, f"touch '{path}'")),
    "numpy's loader": lambda path: Evil(np.load, str(path)),
    "getattr": lambda path: Evil(getattr, np.ndarray, "tofile"),
}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("attack", ATTACKS)
def test_load_wesad_malicious_pickle_runs_no_code(tmp_path, attack, protocol):
    place = tmp_path / "was here"
    evil = ATTACKS[attack](place)
    # Check that the attack works with the standard unpickler.
    if attack in ("os.system", "eval"):
        pickle.loads(pickle.dumps(evil, protocol))
        assert place.exists()
        place.unlink()
    path = put_pickle(tmp_path, protocol=protocol, extra=evil)
    with raises(DamagedFileError, value=path):
        sensors.load_wesad(tmp_path)
    assert not place.exists()


def test_load_wesad_object_array_raises(tmp_path):
    path = put_pickle(tmp_path, label=np.array([None, "a"], dtype=object))
    with raises(DamagedFileError, value=path):
        sensors.load_wesad(tmp_path)


def test_read_restricted_pickle_allocates_no_array(tmp_path):
    path = tmp_path / "a.pkl"
    # The standard unpickler would allocate 800 TB for this array.
    path.write_bytes(b"cnumpy\nndarray\n(I99999999999999\ntR.")
    with pytest.raises(ValueError, match="instead of an array"):
        readers.array_from_pickle(readers.read_restricted_pickle(path))


def test_array_from_pickle_too_few_bytes_raises(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(np.arange(7, dtype=np.uint8), 2).replace(b"K\x07\x85", b"K\x08\x85"))
    with pytest.raises(ValueError, match="7 bytes for uint8 of shape"):
        readers.array_from_pickle(readers.read_restricted_pickle(path))


def test_read_restricted_pickle_reads_all_number_types(tmp_path):
    path = tmp_path / "a.pkl"
    for dtype in ("f4", ">f8", "i1", "u2", "?", "i8"):
        array = np.asfortranarray(np.arange(6).reshape(2, 3)).astype(dtype)
        for protocol in (0, 1, 2, 3, 4):
            path.write_bytes(pickle.dumps({"a": array, "s": np.dtype(dtype).type(1), "e": []}, protocol))
            read = readers.read_restricted_pickle(path)
            found = readers.array_from_pickle(read["a"])
            np.testing.assert_array_equal(found, array)
            assert (read["e"], found.dtype) == ([], array.dtype)


@pytest.mark.parametrize("content", ["empty", "half"])
def test_load_wesad_damaged_pickle_raises_with_path(tmp_path, content):
    path = put_pickle(tmp_path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2]}[content])
    with raises(DamagedFileError, value=path):
        sensors.load_wesad(tmp_path)


def without(place, name):
    found = signals(2)
    del found[place][name]
    return found


def shorter(place, name, rows):
    found = signals(2)
    found[place][name] = found[place][name][:rows]
    return found


BAD = {
    "no label": ({"label": None}, "wrist", "but got: 'None' instead of an array"),
    "label 9": ({"label": np.full(42000, 9)}, "wrist", "but got: labels outside 0 to 7"),
    "no BVP": (
        {"signal": without("wrist", "BVP")},
        "wrist",
        "Expected {path} to contain the wrist's signals with their labels but got: ",
    ),
    "no ECG": (
        {"signal": without("chest", "ECG")},
        "chest",
        "Expected {path} to contain the chest's signals with their labels but got: 'ECG'",
    ),
    "short EDA": (
        {"signal": shorter("wrist", "EDA", 100)},
        "wrist",
        "25.0 s of `EDA`, 60.0 s of `TEMP`, 60.0 s of `label`, as if",
    ),
    "short ECG": ({"signal": shorter("chest", "ECG", 9)}, "chest", "but got: signals and labels of unequal length"),
    "short label": ({"label": labels()[:700]}, "wrist", "60.0 s of `TEMP`, 1.0 s of `label`, as if truncated"),
    "one axis": (
        {"signal": {"wrist": signals()["wrist"] | {"ACC": np.zeros((9, 1))}}},
        "wrist",
        "3 numbers per sample",
    ),
    "text": (
        {"signal": "hello"},
        "wrist",
        "Expected {path} to contain the wrist's signals with their labels but got: ",
    ),
}


def test_load_wesad_missing_pickle_raises_with_path(tmp_path):
    path = put_pickle(tmp_path, 3)
    put_pickle(tmp_path, 2)
    path.unlink()
    with raises(MissingFileError, value=path):
        sensors.load_wesad(tmp_path)


NOT_FINITE = np.where(np.arange(240) == 50, np.nan, 1).astype(np.float32)
STREAMS = {
    "labels of floats": ({"label32": np.zeros(9)}, {}, "Expected `label32` of {path}"),
    "short": ({"label32": np.zeros(9, np.uint8)}, {}, "60.0 s of `TEMP`, 0.3 s of `label`, as if truncated"),
    "not finite": (
        {"eda": NOT_FINITE},
        {},
        "{path} to contain the wrist's signals with their labels but got: non-finite values",
    ),
    "chest": ({}, {"device": "chest"}, "Expected `device` to be 'wrist' with the wrist streams in"),
    "chunk": ({}, {"chunk": 321}, "Expected `chunk` to be at most 320, the time steps of the longest condition"),
}


@pytest.mark.filterwarnings("ignore:Left out")
@pytest.mark.parametrize("case", [*BAD, *STREAMS])
def test_load_wesad_invalid_content_or_option_raises(tmp_path, case):
    if case in BAD:
        changes, device, message = BAD[case]
        path, options = put_pickle(tmp_path, **changes), {"device": device}
    else:
        changes, options, message = STREAMS[case]
        path = put_stream(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message.format(path=path))):
        sensors.load_wesad(tmp_path, **options)


@pytest.mark.seconds
@pytest.mark.data
def test_load_wesad_real_windows_are_parts_of_streams(real, tmp_path):
    folder = real("wesad", "wrist streams")
    windows = Path(folder) / "wesad_wrist" / "windows_10s.npz"
    if not windows.is_file():
        pytest.skip("the layouts of windows and streams are not both present")
    shutil.copy(windows, tmp_path)
    cut, whole = (sensors.load_wesad(root, chunk=320, normalize="none") for root in (tmp_path, folder))
    assert len(cut.x) == 4449
    # Acceleration is not resampled, so each window has the same acceleration in both layouts. The test uses this
    # acceleration to find the window in the streams.
    place = {own.tobytes(): i for i, own in enumerate(np.ascontiguousarray(whole.x[..., :3]))}
    found = [place[own.tobytes()] for own in np.ascontiguousarray(cut.x[..., :3])]
    np.testing.assert_array_equal(whole.y[found], cut.y)
    np.testing.assert_array_equal(whole.client_ids[found], cut.client_ids)
    assert np.median(abs(whole.x[found][..., 3] - cut.x[..., 3])) < 1e-4
