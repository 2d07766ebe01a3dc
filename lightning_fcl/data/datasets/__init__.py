"""Public datasets as NumPy arrays. Each dataset can be read from the file layouts that are commonly used.

Each dataset has an entry in ``sources.yaml``, and a loader ``load_<name>(root, **options)``. The entry contains the
description, the terms of use, the download and the layouts on disk. The import of these modules does not import torch,
scikit-learn, pandas or Pillow.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fcl.data.datasets.arrays import ArrayDataset
from lightning_fcl.data.datasets.cifar import load_cifar10, load_cifar100, load_fc100
from lightning_fcl.data.datasets.digits import load_digits
from lightning_fcl.data.datasets.faces import load_lfw, load_orl
from lightning_fcl.data.datasets.hhar import load_hhar
from lightning_fcl.data.datasets.photographs import load_core50, load_miniimagenet, load_tinyimagenet
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.data.datasets.sensors import load_ucihar, load_wesad
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.io.download import Source, data_root
from lightning_fcl.validation import did_you_mean

__all__ = ["ArrayDataset", "data_root", "download", "list_datasets", "load_dataset", "verify"]

_LOADERS: dict[str, Callable[..., ArrayDataset]] = {
    loader.__name__.removeprefix("load_"): loader
    for loader in (
        *(load_cifar10, load_cifar100, load_core50, load_digits, load_fc100, load_hhar, load_lfw),
        *(load_miniimagenet, load_orl, load_tinyimagenet, load_ucihar, load_wesad),
    )
}


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> ArrayDataset:
    """Load all samples of a dataset.

    Args:
        name: Name of the dataset, one of the names in `list_datasets`.
        root: Folder that contains the datasets. For the default, see `data_root`.
        **options: Arguments of the function ``load_<name>`` except `root`. The types of these arguments are checked.

    Raises:
        ValueError: If the name, an option or a value of an option is invalid, or if the files are damaged.
        FileNotFoundError: If the files are missing.

    Example:
        >>> data = load_dataset("digits")
        >>> data.x.shape, data.classes[:3]
        ((1797, 1, 8, 8), ('0', '1', '2'))
    """
    # Import this function here, because its module imports torch. No other function in this module needs torch.
    from lightning_fcl.models.serialization import validate_arguments

    loader = _LOADERS[_source(name).name]
    return loader(data_root(root), **validate_arguments(loader, options, name))


def list_datasets() -> list[Source]:
    """Return the sources of all datasets, with description, terms of use, download and layouts on disk.

    Example:
        >>> [source.name for source in list_datasets()][:6]
        ['cifar10', 'cifar100', 'core50', 'digits', 'fc100', 'hhar']
    """
    return [*SOURCES.values()]


def verify(name: str, root: str | Path | None = None) -> str:
    """Load a dataset with `load_dataset` and return a one-line summary.

    Example:
        >>> verify("digits")  # doctest: +ELLIPSIS
        'digits: bundled with scikit-learn ...; 1797 samples of shape 1 x 8 x 8, 10 classes, no natural clients'
    """
    layout, path = _source(name).find(root)
    data = load_dataset(name, root)
    shape = " x ".join(str(size) for size in data.x.shape[1:])
    clients = "no natural clients" if data.client_ids is None else f"{len(np.unique(data.client_ids))} clients"
    return f"{name}: {layout} {path}; {len(data.x)} samples of shape {shape}, {len(data.classes)} classes, {clients}"


def download(name: str, root: str | Path | None = None) -> Path:
    """Download a dataset, verify its digest, and return the path that `load_dataset` reads.

    The files are saved in the folder ``root``, see `data_root`. A dataset without a digest is not downloaded. In that
    case, the files must be in the folder already.

    Raises:
        ValueError: If the name is unknown, or if the digest of the download is wrong. The download is then deleted.
        FileNotFoundError: If the dataset must be downloaded by hand and is missing. The message contains the steps.

    Example:
        >>> download("digits").name
        'digits.csv.gz'
    """
    return _source(name).download(root)


def _source(name: str) -> Source:
    if name not in SOURCES:
        source_names = ", ".join(f"`{entry}`" for entry in SOURCES)
        hint = did_you_mean(name.lower(), SOURCES, cutoff=0.5) or "Use one of these names."
        raise UnknownNameError(
            f"Expected a dataset name, one of {source_names}, but got {name!r}.",
            hint=hint,
            argument="name",
            value=name,
        )
    return SOURCES[name]
