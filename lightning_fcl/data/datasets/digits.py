"""Handwritten digits of 8 x 8 pixels, bundled with scikit-learn: the data set that needs no download."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.measurement import Measurement
from lightning_fcl.errors import require
from lightning_fcl.hub.reading import reading
from lightning_fcl.hub.source import Layout

_SKLEARN = find_spec("sklearn")
_PACKAGE = Path(_SKLEARN.origin).parent if _SKLEARN and _SKLEARN.origin else Path()

_LAYOUT = Layout("bundled with scikit-learn", (str(_PACKAGE / "datasets" / "data" / "digits.csv.gz"),))
SOURCE = replace(SOURCES["digits"], layouts=(_LAYOUT,))


def load(root: str | Path | None = None) -> Arrays:
    """Load the digits, shape (1797, 1, 8, 8), scaled from 0..16 to 0..1; the file belongs to scikit-learn."""
    if find_spec("sklearn") is None:
        require("sklearn", "brings the digits")
    path = SOURCE.find(root)[1]
    with reading(path, "to hold the digits of scikit-learn", "Run `pip install --force-reinstall scikit-learn`."):
        table = np.loadtxt(path, delimiter=",")  # importing scikit-learn for it would take seconds
    ink, axes = ("ink", "pixels of 16", 0.0, 16.0), ("channel", "height", "width")
    return Arrays(
        x=(table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32),
        y=table[:, -1].astype(np.int64),
        client=None,
        classes=tuple("0123456789"),
        measurement=Measurement.of_sensors([ink], (1, 8, 8), axes, mean=[0.0], std=[16.0]),
    )
