"""Handwritten digits of 8 x 8 pixels, bundled with scikit-learn: the data set that needs no download."""

from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets import Arrays, Description

__all__ = ["DESCRIPTION", "fetch", "load", "locate"]

DESCRIPTION = Description(
    name="digits",
    content="1797 handwritten digits of 8 x 8 pixels, 10 classes, no writers named",
    licence="CC BY 4.0",
    citation="Alpaydin and Kaynak: Optical Recognition of Handwritten Digits. UCI Machine Learning Repository, 1998",
    url="",
    size="bundled with scikit-learn",
)


def load(root: str | Path | None = None) -> Arrays:
    """Load the digits, scaled from 0..16 to 0..1.

    Args:
        root: Not used: the file belongs to scikit-learn. It is here so that all data sets are called alike.

    Returns:
        `x` of shape (1797, 1, 8, 8) and `y` of the ten digits; no clients, no official test set.

    Example:
        >>> data = load()
        >>> data.x.shape, float(data.x.max())
        ((1797, 1, 8, 8), 1.0)
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    return Arrays(
        x=(bundle.images[:, np.newaxis] / 16).astype(np.float32),
        y=bundle.target.astype(np.int64),
        client=None,
        classes=tuple(str(name) for name in bundle.target_names),
    )


def locate(root: str | Path | None = None) -> str:
    """Say where the digits lie.

    Args:
        root: Not used.

    Returns:
        A phrase for people.

    Example:
        >>> locate()
        'bundled with scikit-learn'
    """
    return DESCRIPTION.size


def fetch(root: str | Path | None = None) -> Path:
    """Return the file inside scikit-learn: there is nothing to download.

    Args:
        root: Not used.

    Returns:
        The path of the file.

    Example:
        >>> fetch().is_file()
        True
    """
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data" / "digits.csv.gz"
