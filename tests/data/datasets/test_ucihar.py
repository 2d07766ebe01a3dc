"""Tests of the UCI HAR loader: it reads the same data from its three layouts and reports damaged files."""

import functools
import io
import zipfile

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.data.datasets.sensors import load_ucihar
from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError

FOLDER = "UCI HAR Dataset"
OUTER = "human+activity+recognition+using+smartphones.zip"
FILES = [f"{prefix}_{axis}" for prefix in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
NAMES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
Y = {"train": [5, 5, 1, 2, 6], "test": [3, 4, 4]}
SUBJECT = {"train": [1, 1, 3, 3, 30], "test": [2, 2, 24]}
REMEDY = "Delete this copy and run `lightning-fcl data download ucihar`"


def tokens(part: str) -> dict[str, list[list[str]]]:
    """Return the numbers of each file as text in the publishers' format, with three digits in the exponent."""
    values = np.random.default_rng(len(part)).normal(size=(9, len(Y[part]), 128)) * 0.3
    shown = [
        [[f"{v:.7e}".replace("e-0", "e-00").replace("e+0", "e+00") for v in row] for row in file] for file in values
    ]
    return dict(zip(FILES, shown, strict=True))


TOKENS = {part: tokens(part) for part in Y}


@functools.cache
def original() -> dict[str, bytes]:
    """Return the files of the original folder by their relative paths."""
    files = {
        "activity_labels.txt": "".join(f"{i} {name}\n" for i, name in enumerate(NAMES, 1)),
        "README.txt": "Hello\n",
    }
    for part in Y:
        files[f"{part}/y_{part}.txt"] = "".join(f"{label}\n" for label in Y[part])
        files[f"{part}/subject_{part}.txt"] = "".join(f"{who}\n" for who in SUBJECT[part])
        for name, rows in TOKENS[part].items():
            lines = ("".join(f"{token:>16}" for token in row) + "\n" for row in rows)
            files[f"{part}/Inertial Signals/{name}_{part}.txt"] = "".join(lines)
    return {name: text.encode() for name, text in files.items()}


def expected(sensors: list[str]) -> np.ndarray:
    """Return the raw windows, parsed from the printed numbers."""
    parts = [
        [
            [[float(t) for t in TOKENS[part][f"{s}_{axis}"][i]] for s in sensors for axis in "xyz"]
            for i in range(len(Y[part]))
        ]
        for part in ("train", "test")
    ]
    return np.array(parts[0] + parts[1]).astype(np.float32)


def zipped(files: dict[str, bytes], prefix: str = f"{FOLDER}/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return buffer.getvalue()


def npz(**changes) -> dict[str, np.ndarray]:
    arrays = {
        "X": expected(["body_acc", "body_gyro", "total_acc"]),
        "y": np.array(Y["train"] + Y["test"], dtype=np.uint8) - np.uint8(1),
        "subject": np.array(SUBJECT["train"] + SUBJECT["test"], dtype=np.uint8),
        "official_test": np.array([0] * 5 + [1] * 3, dtype=np.uint8),
    }
    return arrays | changes


LAYOUTS = {
    "npz": lambda put, root: put(root / "inertial.npz", npz()),
    "npz below ucihar": lambda put, root: put(root / "ucihar" / "inertial.npz", npz()),
    "folder": lambda put, root: put(root / FOLDER, original()),
    "folder below ucihar": lambda put, root: put(root / "ucihar" / FOLDER, original()),
    "root is the folder": lambda put, root: put(root, original()),
    "zip": lambda put, root: put(root / f"{FOLDER}.zip", zipped(original())),
    "zip below ucihar": lambda put, root: put(root / "ucihar" / f"{FOLDER}.zip", zipped(original())),
    "zip in zip": lambda put, root: put(root / "ucihar" / OUTER, zipped({f"{FOLDER}.zip": zipped(original())}, "")),
    "zip from the unpacked outer zip": lambda put, root: put(root / OUTER[:-4] / f"{FOLDER}.zip", zipped(original())),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_ucihar_every_layout_reads_printed_numbers(tmp_path, layout, put):
    LAYOUTS[layout](put, tmp_path)
    data = load_ucihar(tmp_path, standardize=None)
    np.testing.assert_array_equal(data.x, expected(["total_acc", "body_gyro"]))
    assert data.x.dtype == np.float32
    assert data.y.tolist() == [4, 4, 0, 1, 5, 2, 3, 3]
    assert data.client_ids.tolist() == [1, 1, 3, 3, 30, 2, 2, 24]
    assert data.official_test.tolist() == [False] * 5 + [True] * 3
    assert data.classes == tuple(name.lower() for name in NAMES)


@pytest.mark.parametrize("layout", ["npz", "folder", "zip"])
def test_load_ucihar_keeps_requested_order_of_sensors(tmp_path, layout, put):
    LAYOUTS[layout](put, tmp_path)
    data = load_ucihar(tmp_path, sensors=("gyro", "body_acc", "total_acc"), standardize=None)
    np.testing.assert_array_equal(data.x, expected(["body_gyro", "body_acc", "total_acc"]))


def test_ucihar_source_finds_layouts_in_documented_order(tmp_path, put):
    put(tmp_path / OUTER, zipped({f"{FOLDER}.zip": zipped(original())}, ""))
    assert SOURCES["ucihar"].find(tmp_path) == ("zip file", tmp_path / OUTER)
    put(tmp_path / f"{FOLDER}.zip", zipped(original()))
    assert SOURCES["ucihar"].find(tmp_path) == ("zip file", tmp_path / f"{FOLDER}.zip")
    put(tmp_path / FOLDER, original())
    assert SOURCES["ucihar"].find(tmp_path) == ("folder", tmp_path / FOLDER)
    put(tmp_path / "inertial.npz", npz())
    assert SOURCES["ucihar"].find(tmp_path) == ("npz file", tmp_path / "inertial.npz")
    put(tmp_path / "ucihar" / "inertial.npz", npz())
    assert SOURCES["ucihar"].find(tmp_path) == ("npz file", tmp_path / "ucihar" / "inertial.npz")


def test_load_ucihar_standardize_sensor_shares_scale_over_axes(tmp_path, put):
    put(tmp_path / "inertial.npz", npz(X=expected(["body_acc", "body_gyro", "total_acc"]) * 3 + 1))
    raw = load_ucihar(tmp_path, standardize=None).x.astype(np.float64)
    scaled = load_ucihar(tmp_path).x
    for sensor in (slice(0, 3), slice(3, 6)):
        flat = raw[:, sensor].ravel()
        wanted = (raw[:, sensor] - flat.sum() / flat.size) / np.sqrt(((flat - flat.sum() / flat.size) ** 2).mean())
        np.testing.assert_allclose(scaled[:, sensor], wanted, rtol=1e-5, atol=1e-6)
    # The mean of a single axis is 0 only with `standardize="channel"`.
    assert abs(scaled[:, 0].mean()) > 1e-3


def test_load_ucihar_standardize_channel_scales_each_axis(tmp_path, put):
    put(tmp_path / "inertial.npz", npz())
    scaled = load_ucihar(tmp_path, standardize="channel").x.astype(np.float64)
    np.testing.assert_allclose(scaled.mean(axis=(0, 2)), np.zeros(6), atol=1e-6)
    np.testing.assert_allclose(scaled.std(axis=(0, 2)), np.ones(6), atol=1e-6)


def test_load_ucihar_constant_sensor_becomes_zero(tmp_path, put):
    windows = expected(["body_acc", "body_gyro", "total_acc"])
    windows[:, 6:] = 0.1
    put(tmp_path / "inertial.npz", npz(X=windows))
    data = load_ucihar(tmp_path)
    np.testing.assert_allclose(data.x[:, :3], 0, atol=1e-7)
    assert data.x[:, 3:].std() == pytest.approx(1, abs=1e-5)


def edited(name: str, edit) -> dict[str, bytes]:
    """Return the original files, with changed lines in one file."""
    files = dict(original())
    files[name] = b"".join(edit(files[name].splitlines(keepends=True)))
    return files


def replaced(lines: list[bytes], index: int, line: bytes) -> list[bytes]:
    return [*lines[:index], line, *lines[index + 1 :]]


SIGNAL = "train/Inertial Signals/total_acc_y_train.txt"
DAMAGES = {
    "last line cut off": (SIGNAL, lambda lines: replaced(lines, 4, lines[4][:800]), "number of columns changed"),
    "a value too many": (SIGNAL, lambda lines: replaced(lines, 1, b" 1.0" + lines[1]), "number of columns changed"),
    "a line lost": (SIGNAL, lambda lines: lines[:4], "in each of 5 lines but got: 4 line(s) with 128 value(s) each"),
    "an empty signal": (SIGNAL, lambda lines: [], "but got: an empty file."),
    "a word": (SIGNAL, lambda lines: replaced(lines, 2, b"abc" + lines[2][16:]), "could not convert string 'abc'"),
    "a label 7": (
        "test/y_test.txt",
        lambda lines: replaced(lines, 1, b"7\n"),
        "1 value from 1 to 6 in each of its lines",
    ),
    "a label 1.5": ("train/y_train.txt", lambda lines: replaced(lines, 2, b"1.5\n"), "but got: other values."),
    "a subject lost": (
        "test/subject_test.txt",
        lambda lines: lines[:2],
        "in each of 3 lines but got: 2 line(s) with 1 value(s) each.",
    ),
    "another order": (
        "activity_labels.txt",
        lambda lines: [b"1 SITTING\n", *lines[1:]],
        "to name WALKING to LAYING but got: SITTING, WALKING_UPSTAIRS",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_ucihar_damaged_file_raises_with_path(tmp_path, damage, put, refused):
    name, edit, message = DAMAGES[damage]
    put(tmp_path / FOLDER, edited(name, edit))
    said = refused(load_ucihar, tmp_path)
    assert said.startswith(f"Expected {tmp_path / FOLDER / name} to ") and message in said and REMEDY in said


def test_load_ucihar_non_finite_values_raise(tmp_path, put, refused):
    put(tmp_path / FOLDER, edited(SIGNAL, lambda lines: [b" nan" * 128 + b"\n", *lines[1:]]))
    assert "Expected `x` to be finite, but in sample 0, 128 of 768 values are NaN or infinite" in refused(
        load_ucihar, tmp_path
    )


@pytest.mark.parametrize("name", ["activity_labels.txt", "test/y_test.txt", "train/subject_train.txt", SIGNAL])
def test_load_ucihar_missing_file_raises_with_path(tmp_path, name, put):
    files = {key: content for key, content in original().items() if key != name}
    put(tmp_path / "a" / FOLDER, files)
    path = put(tmp_path / "b" / f"{FOLDER}.zip", zipped(files))
    for root, place in ((tmp_path / "a", tmp_path / "a" / FOLDER), (tmp_path / "b", path / FOLDER)):
        with pytest.raises(MissingFileError) as caught:
            load_ucihar(root)
        assert str(caught.value.value) == str(place / name)


def test_load_ucihar_needs_files_of_requested_sensors_only(tmp_path, put):
    put(tmp_path / FOLDER, {name: content for name, content in original().items() if "body_acc" not in name})
    assert load_ucihar(tmp_path).x.shape == (8, 6, 128)
    with pytest.raises(FileNotFoundError, match="body_acc_x_train"):
        load_ucihar(tmp_path, sensors=["body_acc"])


def test_load_ucihar_truncated_zip_raises_with_path(tmp_path, put):
    whole = zipped({f"{FOLDER}.zip": zipped(original())}, "")
    path = put(tmp_path / OUTER, whole[: len(whole) // 2])
    with raises(DamagedFileError, value=path):
        load_ucihar(tmp_path)


def test_load_ucihar_zip_with_flipped_byte_raises_with_path(tmp_path, put, refused):
    content = bytearray(zipped(original()))
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        content[archive.getinfo(f"{FOLDER}/{SIGNAL}").header_offset + 2000] ^= 0xFF
    path = put(tmp_path / f"{FOLDER}.zip", bytes(content))
    said = refused(load_ucihar, tmp_path)
    assert said.startswith(f"Expected {path / FOLDER / SIGNAL} to have 128 values in each") and REMEDY in said


NPZ_DAMAGES = {
    "no subject": ({"subject": None}, "to contain an array 'subject', but it does not."),
    "X of 6 channels": (
        {"X": np.zeros((8, 6, 128), np.float32)},
        "to contain floats of shape (8, 9, 128), but got float32 of shape (8, 6, 128).",
    ),
    "X a scalar": ({"X": np.float32(1)}, "to contain floats of shape ('n', 9, 128), but got float32 of shape ()."),
    "y of floats": ({"y": np.zeros(8)}, "to contain integers of shape (8,), but got float64 of shape (8,)."),
    "y out of range": ({"y": np.arange(8)}, "but got: Expected `y` to be between 0 and 5"),
    "pickles": ({"y": np.array([object()] * 8)}, "without pickles but got: objects in y.npy"),
}


@pytest.mark.parametrize("damage", NPZ_DAMAGES)
def test_load_ucihar_damaged_npz_raises_with_path(damage, damaged):
    changes, message = NPZ_DAMAGES[damage]
    said = damaged("ucihar", "inertial.npz", npz(**changes))
    assert message in said and REMEDY in said


@pytest.mark.parametrize("sensors", ["gyro", (), ("gyro", "gyro"), ("gyro", "body_gyro")])
def test_load_ucihar_invalid_sensors_raise(tmp_path, sensors):
    with raises(InvalidValueError, "sensors"):
        load_ucihar(tmp_path, sensors=sensors)


def test_download_ucihar_creates_loadable_file(tmp_path, publish):
    publish("ucihar", "small.zip", {f"{FOLDER}.zip": zipped(original())})
    root = tmp_path / "data"
    assert SOURCES["ucihar"].download(root) == root / "ucihar" / OUTER
    np.testing.assert_array_equal(load_ucihar(root, standardize=None).x, expected(["total_acc", "body_gyro"]))


@pytest.mark.seconds
@pytest.mark.data
def test_load_ucihar_real_data_has_published_split_and_scale(real):
    data = load_ucihar(real("ucihar"))
    assert int(data.official_test.sum()) == 2947
    assert not set(data.client_ids[data.official_test]) & set(data.client_ids[~data.official_test])
    for sensor in (data.x[:, :3], data.x[:, 3:]):
        assert sensor.mean(dtype=np.float64) == pytest.approx(0, abs=1e-6)
        assert sensor.std(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    # Gravity is in total_acc and not in body_acc. The mean of the x axis differs between lying and walking people.
    raw = load_ucihar(sensors=("total_acc", "body_acc"), standardize=None)
    assert raw.x[raw.y == 0, 0].mean() > 0.8 > 0.3 > raw.x[raw.y == 5, 0].mean()
    assert abs(raw.x[:, 3:].mean()) < 0.05
