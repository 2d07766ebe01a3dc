"""Public data sets as plain arrays: one module a data set, each reading the layouts that people have on disk.

A module of this package offers ``DESCRIPTION``, ``load(root, **options)``, ``locate(root)`` and ``fetch(root)``, and
has one line in the table below. The modules are imported when they are asked for, so that importing this package
costs no more than NumPy.
"""

import difflib
import importlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from lightning_fcl.data.datasets.arrays import Arrays

__all__ = ["Arrays", "Description", "check", "data_root", "describe", "fetch", "load"]

_MODULES = {
    "cifar100": "lightning_fcl.data.datasets.cifar100",
    "core50": "lightning_fcl.data.datasets.core50",
    "digits": "lightning_fcl.data.datasets.digits",
    "fc100": "lightning_fcl.data.datasets.fc100",
    "hhar": "lightning_fcl.data.datasets.hhar",
    "lfw": "lightning_fcl.data.datasets.lfw",
    "miniimagenet": "lightning_fcl.data.datasets.miniimagenet",
    "orl": "lightning_fcl.data.datasets.orl",
    "tinyimagenet": "lightning_fcl.data.datasets.tinyimagenet",
    "ucihar": "lightning_fcl.data.datasets.ucihar",
    "wesad": "lightning_fcl.data.datasets.wesad",
}


@dataclass(frozen=True)
class Description:
    """What a person wants to know of a data set before getting it.

    Args:
        name: The name that `load` takes.
        content: What the samples are, in one line.
        licence: Terms of use.
        citation: The paper to cite.
        url: Where it comes from; empty if it is bundled with a dependency.
        size: Size of the download, for people.

    Example:
        >>> describe()[0].name
        'cifar100'
    """

    name: str
    content: str
    licence: str
    citation: str
    url: str
    size: str


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data sets: the argument, else ``LIGHTNING_FCL_DATA``, else a folder in the user's cache.

    Args:
        root: A folder; ``~`` is expanded. It need not exist.

    Returns:
        The folder.

    Example:
        >>> data_root("some/folder").as_posix()
        'some/folder'
    """
    chosen = root or os.environ.get("LIGHTNING_FCL_DATA") or Path("~/.cache/lightning-fcl/data")
    return Path(chosen).expanduser()


def load(name: str, root: str | Path | None = None, **options: Any) -> Arrays:
    """Load a data set by name.

    Args:
        name: One of the names that `describe` lists.
        root: Folder of the data sets, see `data_root`.
        **options: What the data set's own ``load`` takes besides `root`.

    Returns:
        All its samples.

    Raises:
        ValueError: If no data set has this name, if it has no such option, or if the files are damaged.
        FileNotFoundError: If the files are not there.

    Example:
        >>> data = load("digits")
        >>> data.x.shape, data.classes[:3]
        ((1797, 1, 8, 8), ('0', '1', '2'))
    """
    loader = _module(name).load
    allowed = [option for option in inspect.signature(loader).parameters if option != "root"]
    for option in options:
        if option not in allowed:
            known = ", ".join(f"`{entry}`" for entry in allowed) or "none"
            raise ValueError(
                f"Expected an option of the data set {name!r} ({known}) but got `{option}`. Remove it or mend its "
                "spelling."
            )
    return cast(Arrays, loader(data_root(root), **options))


def describe() -> list[Description]:
    """Describe every known data set, in alphabetical order.

    Returns:
        One `Description` per data set.

    Example:
        >>> [entry.name for entry in describe()][:6]
        ['cifar100', 'core50', 'digits', 'fc100', 'hhar', 'lfw']
    """
    return [cast(Description, _module(name).DESCRIPTION) for name in sorted(_MODULES)]


def check(name: str, root: str | Path | None = None) -> str:
    """Read a data set in full and say in one line what was found.

    Args:
        name: One of the names that `describe` lists.
        root: Folder of the data sets, see `data_root`.

    Returns:
        Layout, samples, classes and clients.

    Raises:
        ValueError: If the name is unknown or the files are damaged.
        FileNotFoundError: If the files are not there.

    Example:
        >>> check("digits")
        'digits: bundled with scikit-learn; 1797 samples of shape 1 x 8 x 8, 10 classes, no natural clients'
    """
    module = _module(name)
    layout = module.locate(data_root(root))
    data = load(name, root)
    shape = " x ".join(str(size) for size in data.x.shape[1:])
    clients = "no natural clients" if data.client is None else f"{len(np.unique(data.client))} clients"
    return f"{name}: {layout}; {len(data.x)} samples of shape {shape}, {len(data.classes)} classes, {clients}"


def fetch(name: str, root: str | Path | None = None) -> Path:
    """Download a data set, verify it, and keep it below the folder of the data sets.

    A file that is already there and verifies is not downloaded again.

    Args:
        name: One of the names that `describe` lists.
        root: Folder of the data sets, see `data_root`.

    Returns:
        The file that `load` will read.

    Raises:
        ValueError: If the name is unknown, or if the download is not the published file.
        ConnectionError: If the download fails.
        FileNotFoundError: If the data set must be downloaded by hand; the message says from where and to which folder.

    Example:
        >>> fetch("digits").name
        'digits.csv.gz'
    """
    return cast(Path, _module(name).fetch(data_root(root)))


def _module(name: str) -> ModuleType:
    if name not in _MODULES:
        known = ", ".join(f"`{entry}`" for entry in sorted(_MODULES))
        near = difflib.get_close_matches(name.lower(), _MODULES, n=1, cutoff=0.5)
        hint = f"Did you mean `{near[0]}`?" if near else "Choose one of these."
        raise ValueError(f"Expected `name` to be one of {known} but got {name!r}. {hint}")
    return importlib.import_module(_MODULES[name])
