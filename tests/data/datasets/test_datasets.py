"""Tests of the registry of datasets and of the checks of `ArrayDataset`."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from lightning_fcl.data import datasets
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.errors import InvalidValueError, MissingPackageError, MissingValueError, UnknownNameError

NAMES = [
    "cifar10",
    "cifar100",
    "core50",
    "digits",
    "fc100",
    "hhar",
    "lfw",
    "miniimagenet",
    "orl",
    "tinyimagenet",
    "ucihar",
    "wesad",
]


def parts(**changes):
    fields = {
        "x": np.arange(24, dtype=np.float32).reshape(4, 2, 3),
        "y": np.array([0, 1, 2, 1]),
        "client_ids": np.array([7, 7, 8, 9]),
        "classes": ("a", "b", "c"),
        "official_test": np.array([False, False, True, True]),
        "group": np.array(["phone", "phone", "watch", "watch"]),
    }
    return fields | changes


def with_bad_values():
    x = parts()["x"].copy()
    x[1, 0, 0], x[1, 1, 2], x[3, 0, 1] = np.nan, np.inf, -np.inf
    return x


def test_array_dataset_keeps_its_arguments():
    fields = parts()
    data = ArrayDataset(**fields)
    for name, value in fields.items():
        assert getattr(data, name) is value
    with pytest.raises(AttributeError):
        data.y = fields["y"]


PIXELS, ZERO, ONE = np.zeros((4, 2, 3), np.uint8), np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
REFUSED = {
    "x float64": ({"x": np.zeros((4, 2))}, (InvalidValueError, "x")),
    "y int32": ({"y": np.zeros(4, np.int32)}, (InvalidValueError, "y")),
    "official_test int": ({"official_test": np.zeros(4, int)}, (InvalidValueError, "official_test")),
    "client float": ({"client_ids": np.zeros(4)}, (InvalidValueError, "client_ids")),
    "group object": ({"group": np.array([None] * 4)}, (InvalidValueError, "group")),
    "no samples": (
        {"x": np.zeros((0, 2), np.float32)},
        (InvalidValueError, "x"),
    ),
    "a scalar": ({"x": np.float32(1)}, (InvalidValueError, "x")),
    "y short": ({"y": np.zeros(3, int)}, (InvalidValueError, "y")),
    "client short": ({"client_ids": np.zeros(3, int)}, (InvalidValueError, "client_ids")),
    "group short": ({"group": np.zeros(3, int)}, (InvalidValueError, "group")),
    "official_test short": ({"official_test": np.zeros(3, bool)}, (InvalidValueError, "official_test")),
    "label C": (
        {"y": np.array([0, 3, 3, 1])},
        (InvalidValueError, "y"),
    ),
    "label -1": ({"y": np.array([0, 1, -1, 1])}, (InvalidValueError, "y")),
    "pixels without a scale": ({"x": PIXELS}, (InvalidValueError, "x")),
    "a scale for floats": ({"mean": ZERO, "std": ONE}, (InvalidValueError, "x")),
    "no std": ({"x": PIXELS, "mean": ZERO}, (MissingValueError, "std")),
    "mean float64": (
        {"x": PIXELS, "mean": ZERO.astype(float), "std": ONE},
        (InvalidValueError, "mean"),
    ),
    "std of another shape": (
        {"x": PIXELS, "mean": ZERO, "std": np.ones((3, 1), np.float32)},
        (InvalidValueError, "std"),
    ),
    "std zero": ({"x": PIXELS, "mean": ZERO, "std": ZERO}, (InvalidValueError, "std")),
    "not finite": (
        {"x": with_bad_values()},
        (InvalidValueError, "x"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_array_dataset_invalid_argument_raises(case):
    changes, expected = REFUSED[case]
    with raises(*expected):
        ArrayDataset(**parts(**changes))


def test_array_dataset_samples_normalizes_pixels():
    x = np.random.default_rng(0).integers(256, size=(4, 2, 3), dtype=np.uint8)
    mean, std = np.array([[100], [120]], np.float32), np.array([[50], [60]], np.float32)
    data = ArrayDataset(**parts(x=x, mean=mean, std=std))
    assert data.x is x
    wanted = (x.astype(np.float64) - [[100], [120]]) / [[50], [60]]
    np.testing.assert_allclose(data.samples(), wanted, rtol=1e-6)
    np.testing.assert_array_equal(data.samples([2, 0]), data.samples()[[2, 0]])
    assert data.samples().dtype == np.float32
    plain = ArrayDataset(**parts())
    np.testing.assert_array_equal(plain.samples([1]), plain.x[[1]])


def test_load_digits_permutations_are_domains_of_same_digits():
    plain, data = datasets.load_dataset("digits"), datasets.load_dataset("digits", permutations=3)
    x = data.x.reshape(3, 1797, 64)
    assert np.array_equal(x[0], plain.x.reshape(-1, 64)) and np.array_equal(data.y, np.tile(plain.y, 3))
    assert not np.array_equal(x[1], x[0]) and not np.array_equal(x[1], x[2])
    for domain in x[1:]:
        order = [int(np.flatnonzero((x[0] == column[:, None]).all(axis=0))[0]) for column in domain.T]
        # In all digits of a domain, the pixels are permuted in the same order.
        assert np.array_equal(x[0][:, order], domain)
    assert data.group[[0, 1797, -1]].tolist() == ["00", "01", "02"]
    assert np.array_equal(data.official_test, np.tile(np.arange(1797) % 5 == 4, 3))
    assert np.array_equal(data.x, datasets.load_dataset("digits", permutations=3).x)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "permutations"):
        datasets.load_dataset("digits", permutations=0)


def test_load_digits_equals_scikit_learn():
    from sklearn.datasets import load_digits

    flat, y = load_digits(return_X_y=True)
    data = datasets.load_dataset("digits")
    np.testing.assert_array_equal(data.x.reshape(1797, 64) * 16, flat)
    np.testing.assert_array_equal(data.y, y)
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.classes == tuple("0123456789")
    assert data.client_ids is None
    assert datasets.download("digits").is_file()


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path / "environment"))
    assert datasets.data_root(tmp_path / "argument") == tmp_path / "argument"
    assert datasets.data_root("~/somewhere") == Path.home() / "somewhere"
    assert datasets.data_root() == tmp_path / "environment"
    for unset in ("", None):
        monkeypatch.setenv("LIGHTNING_FCL_DATA", unset) if unset is not None else monkeypatch.delenv(
            "LIGHTNING_FCL_DATA"
        )
        assert datasets.data_root() == Path.home() / ".cache" / "lightning-fcl" / "data"


@pytest.fixture
def small(tmp_path):
    """Return a root folder with ten windows in the layout of UCI HAR."""
    rng = np.random.default_rng(0)
    windows = rng.normal(size=(10, 9, 128)).astype(np.float32)
    subject = np.array([1, 1, 1, 4, 4, 4, 4, 9, 9, 9])
    np.savez(tmp_path / "inertial.npz", X=windows, y=np.arange(10) % 6, subject=subject, official_test=subject == 9)
    return tmp_path


def test_load_dataset_passes_root_and_options_to_loader(small, monkeypatch):
    data = datasets.load_dataset("ucihar", small, sensors=("gyro",), standardize=None)
    np.testing.assert_array_equal(data.x, np.load(small / "inertial.npz")["X"][:, 3:6])
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(small))
    np.testing.assert_array_equal(datasets.load_dataset("ucihar", sensors=("gyro",), standardize=None).x, data.x)


def test_load_dataset_unknown_option_raises(small):
    with raises(UnknownNameError, "ucihar"):
        datasets.load_dataset("ucihar", small, sensor="gyro")
    with raises(UnknownNameError, "digits"):
        datasets.load_dataset("digits", sensors=("gyro",))


@pytest.mark.parametrize("call", [datasets.load_dataset, datasets.verify, datasets.download])
def test_unknown_dataset_name_raises_with_suggestion(call):
    known = f"Expected a dataset name, one of {', '.join(f'`{name}`' for name in NAMES)}, but got"
    with pytest.raises(ValueError, match=re.escape(f"{known} 'UCI-HAR'. Did you mean ucihar?")):
        call("UCI-HAR")
    with pytest.raises(ValueError, match=re.escape(f"{known} 'digit'. Did you mean digits?")):
        call("digit")
    with raises(UnknownNameError, "name", value="zzz"):
        call("zzz")


def test_verify_returns_summary(small):
    found = datasets.verify("ucihar", small)
    assert found == f"ucihar: npz file {small / 'inertial.npz'}; 10 samples of shape 6 x 128, 6 classes, 3 clients"


def test_list_datasets_describes_every_dataset():
    described = datasets.list_datasets()
    assert [entry.name for entry in described] == NAMES
    for entry in described:
        assert all("\n" not in text for text in vars(entry).values())
        assert entry.content and entry.license and entry.citation and entry.size
    homes = (
        "https://archive.ics.uci.edu/",
        "https://ndownloader.figshare.com/",
        "https://cam-orl.co.uk/",
        "https://www.cs.toronto.edu/",
        "http://cs231n.stanford.edu/",
        "http://bias.csr.unibo.it/",
        "https://github.com/yaoyao-liu/mini-imagenet-tools",
    )
    assert all(entry.url.startswith(homes) for entry in described if entry.name != "digits")


def test_import_of_datasets_loads_no_optional_package():
    # The `__init__` of the package may import torch, so the module is imported without it.
    code = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('lightning_fcl')\n"
        f"package.__path__ = [{str(Path(datasets.__file__).parents[2])!r}]\n"
        "sys.modules['lightning_fcl'] = package\n"
        "import lightning_fcl.data.datasets\n"
        "lightning_fcl.data.datasets.list_datasets()\n"
        "print(sorted({'torch', 'sklearn', 'pooch', 'lightning', 'pandas', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [("sklearn", "sklearn", "digits"), ("PIL", "PIL.Image", "orl"), ("pandas", "pandas", "hhar")],
)
def test_load_dataset_missing_package_raises_with_name(tmp_path, monkeypatch, package, module, name):
    for path in ("orl/s1/1.pgm", "hhar/Phones_accelerometer.csv"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setitem(sys.modules, module, None)
    with raises(MissingPackageError, value=package):
        datasets.load_dataset(name, tmp_path)
