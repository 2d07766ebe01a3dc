"""Handwritten digits of 8 x 8 pixels from scikit-learn. No download is needed."""

import gzip
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets.arrays import ArrayDataset, Measurement
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.io.download import Layout
from lightning_fcl.io.reading import as_file_error, open_file
from lightning_fcl.validation import at_least, require_package

_SKLEARN = find_spec("sklearn")
_PACKAGE = Path(_SKLEARN.origin).parent if _SKLEARN and _SKLEARN.origin else Path()

_LAYOUT = Layout("bundled with scikit-learn", (str(_PACKAGE / "datasets" / "data" / "digits.csv.gz"),))
_DIGITS = SOURCES["digits"] = replace(SOURCES["digits"], layouts=(_LAYOUT,))


def load_digits(root: str | Path | None = None, permutations: int = 1) -> ArrayDataset:
    """Load the digits from a file in scikit-learn. Pixels are scaled from 0..16 to 0..1.

    By default, the samples have shape (1797, 1, 8, 8). With ``permutations`` above 1, the result is a
    domain-incremental dataset like permuted MNIST. Each digit occurs once in each domain ``"00"``, ``"01"`` and so on.
    The first domain has the original order of pixels. Each of the other domains has its own random order, which is the
    same in every call. Every fifth digit is in the official test set of all domains.

    Args:
        root: Not used. The argument exists because all loaders have it.
        permutations: Number of domains. With 1, the dataset has no domains and no official test set.
    """
    at_least(1, permutations=permutations)
    if find_spec("sklearn") is None:
        require_package("sklearn", "contains the digits")
    path = _DIGITS.find(root)[1]
    with as_file_error(
        path, "to contain the digits of scikit-learn", "Run `pip install --force-reinstall scikit-learn`."
    ):
        # Read the file directly, because importing scikit-learn would take seconds.
        file = gzip.open(open_file(path), "rt")  # noqa: SIM115 # closed when it is garbage-collected
        table = np.loadtxt(file, delimiter=",")
    ink, axes = ("ink", "pixels of 16", 0.0, 16.0), ("channel", "height", "width")
    pixels, digits = (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)
    if permutations == 1:
        sensed = Measurement.from_sensors([ink], (1, 8, 8), axes, mean=[0.0], std=[16.0])
        return ArrayDataset(pixels.reshape(-1, 1, 8, 8), digits, None, tuple("0123456789"), measurement=sensed)
    rng = np.random.default_rng(0)
    orders = [np.arange(64), *(rng.permutation(64) for _ in range(permutations - 1))]
    return ArrayDataset(
        x=np.concatenate([pixels[:, order] for order in orders]).reshape(-1, 1, 8, 8),
        y=np.tile(digits, permutations),
        client_ids=None,
        classes=tuple("0123456789"),
        official_test=np.tile(np.arange(len(digits)) % 5 == 4, permutations),
        group=np.repeat([f"{number:02}" for number in range(permutations)], len(digits)),
    )
