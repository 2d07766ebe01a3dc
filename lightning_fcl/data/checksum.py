"""SHA-256 checksum of the samples of a stream, in memory or in files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fcl.data.labels import to_array
from lightning_fcl.data.samples import Samples, innermost_items
from lightning_fcl.io.file_digests import file_digests

# Datasets whose items are each read from exactly one file, by the class that defines `__getitem__`: the attribute with
# the path of each item, or with a tuple of the path and further values.
_FILES = {
    "DatasetFolder": "samples",
    **dict.fromkeys(("CLEVRClassification", "DTD", "FGVCAircraft", "Flowers102", "Food101", "SUN397"), "_image_files"),
    **dict.fromkeys(("GTSRB", "Imagenette", "RenderedSST2", "StanfordCars"), "_samples"),
    "LFWPeople": "data",
    "Places365": "imgs",
}
# Datasets that store their items in memory: the attributes with one entry for each item.
_ARRAYS = {
    **dict.fromkeys(("CIFAR10", "MNIST", "QMNIST", "USPS"), ("data", "targets")),
    **dict.fromkeys(("SEMEION", "STL10", "SVHN"), ("data", "labels")),
    "TensorDataset": ("tensors",),
    "Table": ("x", "targets"),
}
_KNOWN_MODULES = ("torchvision.datasets.", "torch.utils.data.", "lightning_fcl.data.tables")
_COLUMNS = ("targets", "client_ids", "group", "test", "validation")


def data_checksum(samples: Samples) -> str | None:
    """Return the SHA-256 of samples with their targets, owners, domains and splits, as 64 hexadecimal digits.

    For samples in files, the checksum covers the content of each file that an item of the dataset is read from, and the
    path of the file relative to the folder that contains all files of the dataset. The checksum does not depend on the
    location of this folder, on modification times, or on the order of the items. Checksums of files are cached, see
    `file_digests`.

    Returns:
        The checksum. None if a dataset is not known to read exactly one known file per item, or if a file cannot be
        read. Examples are a custom Dataset class, and a subclass of ``ImageFolder`` that overrides ``__getitem__``.
    """
    samples = samples.raw_samples or samples
    columns = {name: getattr(samples, name) for name in _COLUMNS}
    columns = {name: values for name, values in columns.items() if values is not None}
    if isinstance(samples.x, Tensor):
        return _hash_arrays({"x": _to_numpy(samples.x), **columns}).hex()
    if not len(samples.targets):
        del columns["targets"]
    rows, digests = range(len(samples)), list[bytes]()
    for data, part_rows, positions in innermost_items(samples.x, rows, rows):
        part_columns = {name: values[positions] for name, values in columns.items()}
        if (digest := _hash_part(data, part_rows, part_columns, samples.classes)) is None:
            return None
        digests.append(digest)
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _hash_part(
    data: Dataset[Any], rows: Sequence[int], columns: Mapping[str, NDArray[Any]], classes: Sequence[str]
) -> bytes | None:
    """Return the checksum of some items of one dataset. None if the content of the items is unknown.

    Args:
        data: The dataset.
        rows: Indices of the items.
        columns: Targets, owners, domains and splits of the items, by name.
        classes: Names of the classes. Empty if targets are not classes.
    """
    reader = _reader(type(data))
    if reader in _ARRAYS:
        stored = chain.from_iterable(_arrays(getattr(data, name)) for name in _ARRAYS[reader])
        arrays = {f"array {number}": to_array(value)[rows] for number, value in enumerate(stored) if value is not None}
        return _hash_arrays({**arrays, **columns})
    # Without targets of the stream, the loss uses values of the items that are not in the files.
    if reader not in _FILES or "targets" not in columns:
        return None
    entries = getattr(data, _FILES[reader])
    paths = [
        os.path.abspath(entry if isinstance(entry, str | Path) else entry[0])
        for entry in map(entries.__getitem__, rows)
    ]
    try:
        folder = os.path.commonpath({os.path.dirname(path) for path in paths})
        names = [Path(path).relative_to(folder).as_posix() for path in paths]
        digests = file_digests(Path(folder), dict.fromkeys(names))
    except (OSError, ValueError):
        return None
    if classes:
        columns = {**columns, "targets": np.asarray(classes)[columns["targets"]]}
    texts = [[name, digests[name]] for name in names]
    for name, values in columns.items():
        for text, value in zip(texts, values.tolist(), strict=True):
            text += [name, repr(value)]
    return hashlib.sha256("".join(sorted(repr(text) for text in texts)).encode(errors="surrogateescape")).digest()


def _reader(kind: type) -> str:
    """Return the name of the class that defines how the items of a dataset are read. Empty if the class is unknown."""
    owners = {
        next((base for base in kind.__mro__ if name in vars(base)), object) for name in ("__getitem__", "__getitems__")
    }
    names = {owner.__name__ for owner in owners if owner is not object}
    is_known = all(f"{owner.__module__}.".startswith(_KNOWN_MODULES) for owner in owners if owner is not object)
    return names.pop() if is_known and len(names) == 1 else ""


def _arrays(values: Any) -> Iterator[Any]:
    yield from values if isinstance(values, tuple) else [values]


def _hash_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of named arrays, with their types and shapes."""
    digest = hashlib.sha256()
    for name, values in arrays.items():
        array = np.ascontiguousarray(values)
        array = array.astype("U") if array.dtype.kind == "O" else array
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.digest()


def _to_numpy(x: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.contiguous().view(torch.uint8 if x.dtype == torch.bfloat16 else x.dtype).numpy()
    return array
