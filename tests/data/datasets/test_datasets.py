"""The registry of data sets, and what `Arrays` refuses."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_fcl.data import datasets
from lightning_fcl.data.datasets import Arrays
from lightning_fcl.errors import InvalidValueError

NAMES = [
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
        "client": np.array([7, 7, 8, 9]),
        "classes": ("a", "b", "c"),
        "official_test": np.array([False, False, True, True]),
        "group": np.array(["phone", "phone", "watch", "watch"]),
    }
    return fields | changes


def with_bad_values():
    x = parts()["x"].copy()
    x[1, 0, 0], x[1, 1, 2], x[3, 0, 1] = np.nan, np.inf, -np.inf
    return x


def test_arrays_keep_what_they_are_given():
    fields = parts()
    data = Arrays(**fields)
    for name, value in fields.items():
        assert getattr(data, name) is value
    with pytest.raises(AttributeError):
        data.y = fields["y"]


EACH = "one entry for each of 4 samples, but got "
PIXELS, ZERO, ONE = np.zeros((4, 2, 3), np.uint8), np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
FITS = " of a shape that broadcasts to a sample, (2, 3), but got "
REFUSED = {
    "x float64": ({"x": np.zeros((4, 2))}, "Expected `x` to hold float32 but got float64 of shape (4, 2). Convert"),
    "y int32": ({"y": np.zeros(4, np.int32)}, f"Expected `y` to hold int64, {EACH}int32"),
    "official_test int": ({"official_test": np.zeros(4, int)}, f"Expected `official_test` to hold bool, {EACH}int64"),
    "client float": ({"client": np.zeros(4)}, "Expected `client` to hold integers or text, one entry"),
    "group object": ({"group": np.array([None] * 4)}, f"Expected `group` to hold integers or text, {EACH}object"),
    "no samples": (
        {"x": np.zeros((0, 2), np.float32)},
        "to hold at least one sample but got shape (0, 2).",
    ),
    "a scalar": ({"x": np.float32(1)}, "Expected `x` to hold at least one sample but got shape ()."),
    "y short": ({"y": np.zeros(3, int)}, f"{EACH}int64 of shape (3,)."),
    "client short": ({"client": np.zeros(3, int)}, f"{EACH}int64 of shape (3,)."),
    "group short": ({"group": np.zeros(3, int)}, f"{EACH}int64 of shape (3,)."),
    "official_test short": ({"official_test": np.zeros(3, bool)}, f"{EACH}bool of shape (3,)."),
    "label C": (
        {"y": np.array([0, 3, 3, 1])},
        "Expected `y` to be between 0 and 2, a label for each of the 3 `classes`, but got 3 in sample 1 (and 2 "
        "such labels in all). Number the labels from 0, or name every class.",
    ),
    "label -1": ({"y": np.array([0, 1, -1, 1])}, "but got -1 in sample 2 (and 1 such labels in all)."),
    "pixels without a scale": ({"x": PIXELS}, "Expected `x` to hold float32 but got uint8"),
    "a scale for floats": ({"mean": ZERO, "std": ONE}, "Expected `x` to hold uint8 but got float32"),
    "no std": ({"x": PIXELS, "mean": ZERO}, "Expected `mean` and `std`, but got no `std`. Pass both, or neither."),
    "mean float64": (
        {"x": PIXELS, "mean": ZERO.astype(float), "std": ONE},
        "Expected `mean` to hold float32 but got float64",
    ),
    "std of another shape": (
        {"x": PIXELS, "mean": ZERO, "std": np.ones((3, 1), np.float32)},
        f"and{FITS}[1.0, 1.0, 1.0] of shape (3, 1). For one value per",
    ),
    "std zero": ({"x": PIXELS, "mean": ZERO, "std": ZERO}, f"Expected `std` to be finite, above 0, and{FITS}[0.0] of"),
    "not finite": (
        {"x": with_bad_values()},
        "Expected `x` to be finite but got 2 NaN or infinite values of 6 in sample 1 (2 of 4 samples "
        "have such values). Mend or drop",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_refuse(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        Arrays(**parts(**changes))


def test_pixels_are_normalised_when_they_are_taken():
    x = np.random.default_rng(0).integers(256, size=(4, 2, 3), dtype=np.uint8)
    mean, std = np.array([[100], [120]], np.float32), np.array([[50], [60]], np.float32)
    data = Arrays(**parts(x=x, mean=mean, std=std))
    assert data.x is x
    wanted = (x.astype(np.float64) - [[100], [120]]) / [[50], [60]]
    np.testing.assert_allclose(data.samples(), wanted, rtol=1e-6)
    np.testing.assert_array_equal(data.samples([2, 0]), data.samples()[[2, 0]])
    assert data.samples().dtype == np.float32
    plain = Arrays(**parts())
    np.testing.assert_array_equal(plain.samples([1]), plain.x[[1]])


def test_permuted_digits_are_domains_of_the_same_digits():
    plain, data = datasets.load_dataset("digits"), datasets.load_dataset("digits", permutations=3)
    x = data.x.reshape(3, 1797, 64)
    assert np.array_equal(x[0], plain.x.reshape(-1, 64)) and np.array_equal(data.y, np.tile(plain.y, 3))
    assert not np.array_equal(x[1], x[0]) and not np.array_equal(x[1], x[2])
    for domain in x[1:]:
        order = [int(np.flatnonzero((x[0] == column[:, None]).all(axis=0))[0]) for column in domain.T]
        assert np.array_equal(x[0][:, order], domain)  # every digit's pixels in one and the same order
    assert data.group[[0, 1797, -1]].tolist() == ["00", "01", "02"]
    assert np.array_equal(data.official_test, np.tile(np.arange(1797) % 5 == 4, 3))
    assert np.array_equal(data.x, datasets.load_dataset("digits", permutations=3).x)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "permutations"):
        datasets.load_dataset("digits", permutations=0)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    flat, y = load_digits(return_X_y=True)
    data = datasets.load_dataset("digits")
    np.testing.assert_array_equal(data.x.reshape(1797, 64) * 16, flat)
    np.testing.assert_array_equal(data.y, y)
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.classes == tuple("0123456789")
    assert data.client is None
    assert datasets.fetch("digits").is_file()


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
    """A root with ten windows in place of UCI HAR."""
    rng = np.random.default_rng(0)
    windows = rng.normal(size=(10, 9, 128)).astype(np.float32)
    subject = np.array([1, 1, 1, 4, 4, 4, 4, 9, 9, 9])
    np.savez(tmp_path / "inertial.npz", X=windows, y=np.arange(10) % 6, subject=subject, official_test=subject == 9)
    return tmp_path


def test_load_hands_on_root_and_options(small, monkeypatch):
    data = datasets.load_dataset("ucihar", small, sensors=("gyro",), standardize=None)
    np.testing.assert_array_equal(data.x, np.load(small / "inertial.npz")["X"][:, 3:6])
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(small))
    np.testing.assert_array_equal(datasets.load_dataset("ucihar", sensors=("gyro",), standardize=None).x, data.x)


def test_load_refuses_unknown_options(small):
    message = r"Expected arguments of \S+\.load_ucihar for `ucihar` but got others: .* Did you mean"
    with pytest.raises(ValueError, match=f"{message} sensors"):
        datasets.load_dataset("ucihar", small, sensor="gyro")
    with pytest.raises(ValueError, match="unexpected keyword argument 'sensors'"):
        datasets.load_dataset("digits", sensors=("gyro",))


@pytest.mark.parametrize("call", [datasets.load_dataset, datasets.check, datasets.fetch])
def test_unknown_names(call):
    known = f"Expected the name of a data set, one of {', '.join(f'`{name}`' for name in NAMES)}, but got"
    with pytest.raises(ValueError, match=re.escape(f"{known} 'UCI-HAR'. Did you mean ucihar?")):
        call("UCI-HAR")
    with pytest.raises(ValueError, match=re.escape(f"{known} 'digit'. Did you mean digits?")):
        call("digit")
    with pytest.raises(ValueError, match=re.escape(f"{known} 'zzz'. Choose one of these.")):
        call("zzz")


def test_check_says_what_was_found(small):
    found = datasets.check("ucihar", small)
    assert found == f"ucihar: npz file {small / 'inertial.npz'}; 10 samples of shape 6 x 128, 6 classes, 3 clients"


def test_every_data_set_is_described():
    described = datasets.describe()
    assert [entry.name for entry in described] == NAMES
    for entry in described:
        assert all("\n" not in text for text in vars(entry).values())
        assert entry.content and entry.licence and entry.citation and entry.size
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


def test_importing_the_loaders_needs_neither_torch_nor_sklearn_nor_pandas_nor_pillow():
    # The package's own __init__ may import torch, so this module is imported without it.
    code = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('lightning_fcl')\n"
        f"package.__path__ = [{str(Path(datasets.__file__).parents[2])!r}]\n"
        "sys.modules['lightning_fcl'] = package\n"
        "import lightning_fcl.data.datasets\n"
        "lightning_fcl.data.datasets.describe()\n"
        "print(sorted({'torch', 'sklearn', 'pooch', 'lightning', 'pandas', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [("sklearn", "sklearn", "digits"), ("PIL", "PIL.Image", "orl"), ("pandas", "pandas", "hhar")],
)
def test_what_reads_a_data_set_is_named_where_it_is_missing(tmp_path, monkeypatch, package, module, name):
    for path in ("orl/s1/1.pgm", "hhar/Phones_accelerometer.csv"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setitem(sys.modules, module, None)
    distribution = {"sklearn": "scikit-learn", "PIL": "pillow"}.get(package, package)
    message = f"Expected `{package}`, which .*, but it is not installed. Run `pip install {distribution}`."
    with pytest.raises(ModuleNotFoundError, match=message):
        datasets.load_dataset(name, tmp_path)
