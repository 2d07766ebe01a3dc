"""Public data sets as plain arrays, each read in the layouts that people have on disk.

A data set is an entry of ``sources.yaml``, which says what it is and where it comes from, and a function that reads it,
``load_<name>(root, **options)``, in the module of its kind. The modules import no more than NumPy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fcl.data.datasets.arrays import ArrayDataset
from lightning_fcl.data.datasets.digits import load_digits
from lightning_fcl.data.datasets.faces import load_lfw, load_orl
from lightning_fcl.data.datasets.hhar import load_hhar
from lightning_fcl.data.datasets.photographs import (
    load_cifar100,
    load_core50,
    load_fc100,
    load_miniimagenet,
    load_tinyimagenet,
)
from lightning_fcl.data.datasets.readers import SOURCES
from lightning_fcl.data.datasets.sensors import load_ucihar, load_wesad
from lightning_fcl.errors import UnknownNameError
from lightning_fcl.io.download import Source, data_root
from lightning_fcl.validation import did_you_mean

__all__ = ["ArrayDataset", "data_root", "download", "list_datasets", "load_dataset", "verify"]

_LOADERS: dict[str, Callable[..., ArrayDataset]] = {
    loader.__name__.removeprefix("load_"): loader
    for loader in (
        *(load_cifar100, load_core50, load_digits, load_fc100, load_hhar, load_lfw),
        *(load_miniimagenet, load_orl, load_tinyimagenet, load_ucihar, load_wesad),
    )
}


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> ArrayDataset:
    """Load all samples of a data set by name.

    Args:
        name: One of the names that `list_datasets` lists.
        root: Folder of the data sets, see `data_root`.
        **options: What the data set's own function takes besides `root`, of the types that it says.

    Raises:
        ValueError: If there is no such data set or option, or if the files are damaged.
        FileNotFoundError: If the files are not there.

    Example:
        >>> data = load_dataset("digits")
        >>> data.x.shape, data.classes[:3]
        ((1797, 1, 8, 8), ('0', '1', '2'))
    """
    from lightning_fcl.models.serialization import validate_arguments  # with torch, which nothing else here needs

    loader = _LOADERS[_source(name).name]
    return loader(data_root(root), **validate_arguments(loader, options, name))


def list_datasets() -> list[Source]:
    """What each known data set is, its terms of use, where it comes from and how it lies on disk, by name.

    Example:
        >>> [source.name for source in list_datasets()][:6]
        ['cifar100', 'core50', 'digits', 'fc100', 'hhar', 'lfw']
    """
    return [*SOURCES.values()]


def verify(name: str, root: str | Path | None = None) -> str:
    """Read a data set, as `load_dataset` does, and say in one line what was found.

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
    """Download a data set, verify it, and keep it below the folder of the data sets; the path that will be read.

    Raises:
        ValueError: If the name is unknown, or if the download is not the published file, which is deleted then.

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
            f"Expected the name of a data set, one of {source_names}, but got {name!r}.",
            hint=hint,
            argument="name",
            value=name,
        )
    return SOURCES[name]
