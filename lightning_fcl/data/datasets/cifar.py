"""Datasets CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), and FC100, a split of CIFAR-100."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset
from lightning_fcl.data.datasets.images import (
    Scale,
    packed_images,
    photo_dataset,
    read_image,
    resize_all,
    resize_all_once,
)
from lightning_fcl.data.datasets.readers import (
    SOURCES,
    array_from_pickle,
    check_int_range,
    read_npz,
    read_restricted_pickle,
)
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.download import Source
from lightning_fcl.io.reading import as_file_error, check, open_file
from lightning_fcl.validation import at_least

_CIFAR10, _CIFAR100, _FC100 = SOURCES["cifar10"], SOURCES["cifar100"], SOURCES["fc100"]

# MD5 digests of the files, as in torchvision/datasets/cifar.py. The first file contains the names of the classes.
CIFAR10_MD5 = {
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR100_MD5 = {
    "meta": "7973b15100ade9c7d40fb424638fde48",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}

# The classes of CIFAR-10 in the order of their labels, which is alphabetical.
CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}

# Images, labels, and mask of the test images.
_Photographs = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]


def load_cifar10(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> ArrayDataset:
    """Load CIFAR-10: photographs of ten classes, 32 x 32 pixels.

    The dataset is from Krizhevsky 2009, "Learning multiple layers of features from tiny images", University of Toronto.
    Three layouts are supported. The loader looks for the layouts in this order:

    1. The original folder ``cifar-10-batches-py`` with the pickles ``data_batch_1`` to ``data_batch_5``, ``test_batch``
       and ``batches.meta``. No function that a pickle names is called.
    2. A folder of PNG or JPEG images for each class, as in ``cifar10/train/airplane/0001.png``, and the same folders in
       ``cifar10/test``. The images of a class are in the order of their names.
    3. ``cifar10/images.npz`` with all images as JPEG.

    All images are loaded: first the training set, then the publishers' test set. Together, they have 60000 images. JPEG
    images differ slightly from the original pixels. Pixels of layouts 2 and 3 are cached in the user's cache folder.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels to which the images are resized.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.

    Returns:
        A dataset with `x` of shape (n, 3, size, size).
    """
    at_least(1, size=size)
    layout, path = _CIFAR10.find(root)
    readers = {
        "pickles": _cifar10_from_pickles,
        "folders of images": _cifar10_from_folders,
        "npz file": _cifar10_from_npz,
    }
    pixels, y, test = readers[layout](path, size)
    return photo_dataset(pixels, y, CIFAR10_CLASSES, normalize, test)


def _cifar10_from_pickles(folder: Path, size: int) -> _Photographs:
    meta, *parts = _read_pickles(folder, CIFAR10_MD5, _CIFAR10)
    _check_classes(meta["label_names"], folder / "batches.meta")
    y = np.concatenate([part["labels"] for part in parts])
    y = check_int_range(y, len(CIFAR10_CLASSES) - 1, f"labels of {folder}", _CIFAR10.remedy)
    return _pixels(parts, size), y, np.arange(len(y)) >= len(y) - len(parts[-1]["labels"])


def _cifar10_from_folders(folder: Path, size: int) -> _Photographs:
    paths: list[Path] = []
    labels: list[int] = []
    for split_name in ("train", "test"):
        class_paths = [
            sorted(path for path in (folder / split_name / name).glob("*.*") if path.suffix.lower() in _FORMATS)
            for name in CIFAR10_CLASSES
        ]
        num_images = max(map(len, class_paths))
        for label, (name, image_paths) in enumerate(zip(CIFAR10_CLASSES, class_paths, strict=True)):
            if not image_paths or len(image_paths) < num_images:
                raise InvalidValueError(
                    f"Expected {folder / split_name / name} to contain {num_images} images, like the other classes, "
                    f"but got {len(image_paths)}. The images are only partly unpacked. {_CIFAR10.remedy}",
                    value=folder / split_name / name,
                )
            paths += image_paths
            labels += [label] * len(image_paths)
        if split_name == "train":
            num_train = len(paths)
    images = (read_image(path, _FORMATS[path.suffix.lower()], "RGB", (32, 32)) for path in paths)
    pixels = resize_all_once(paths, images, [CIFAR10_CLASSES[label] for label in labels], size)
    return pixels, np.array(labels), np.arange(len(paths)) >= num_train


def _cifar10_from_npz(path: Path, size: int) -> _Photographs:
    spec: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "jpeg": ("pixels", ("bytes",)),
        "offsets": ("iu", ("bounds",)),
        "y": ("iu", ("images",)),
        "train": ("biu", ("images",)),
        "names": ("U", (len(CIFAR10_CLASSES),)),
    }
    arrays = read_npz(path, spec, _CIFAR10.remedy)
    _check_classes(arrays["names"].tolist(), path)
    y = check_int_range(arrays["y"], len(CIFAR10_CLASSES) - 1, f"`y` of {path}", _CIFAR10.remedy)
    images = packed_images(path, arrays, "jpeg", [f"{n}.jpg" for n in range(len(y))], _CIFAR10.remedy)
    pixels = resize_all_once([path], images, [CIFAR10_CLASSES[label] for label in y], size)
    test = ~arrays["train"].astype(bool)
    # The training images come first in all layouts.
    order = np.argsort(test, kind="stable")
    return pixels[order], y[order], test[order]


def _check_classes(names: Sequence[str], path: Path) -> None:
    with as_file_error(path, "to name the ten classes of CIFAR-10", _CIFAR10.remedy):
        check(tuple(names) == CIFAR10_CLASSES, str(names)[:80])


def load_cifar100(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> ArrayDataset:
    """Load CIFAR-100: photographs of 100 classes in 20 superclasses, 32 x 32 pixels.

    The dataset is from Krizhevsky 2009, "Learning multiple layers of features from tiny images", University of Toronto.
    The loader reads the original folder ``cifar-100-python`` with the pickles ``train``, ``test`` and ``meta``. No
    function that a pickle names is called.

    All images are loaded: first the training set, then the publishers' test set. Together, they have 60000 images.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels to which the images are resized.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.

    Returns:
        A dataset with `x` of shape (n, 3, size, size).
    """
    at_least(1, size=size)
    pixels, labels, names, test = read_images(_CIFAR100.find(root)[1], size)
    return photo_dataset(pixels, labels["fine"], names["fine"], normalize, test)


def read_images(
    folder: Path, size: int
) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.int64]], dict[str, tuple[str, ...]], NDArray[np.bool_]]:
    """Return images, labels, class names, and a test mask. Labels and names are dicts: keys "fine" and "coarse"."""
    meta, *parts = _read_pickles(folder, CIFAR100_MD5, _CIFAR100)
    pixels = _pixels(parts, size)
    labels = {kind: np.concatenate([part[f"{kind}_labels"] for part in parts]) for kind in ("fine", "coarse")}
    names = {kind: tuple(meta[f"{kind}_label_names"]) for kind in ("fine", "coarse")}
    test = np.repeat([False, True], [len(part["fine_labels"]) for part in parts])
    return pixels, labels, names, test


def _read_pickles(folder: Path, digests: Mapping[str, str], source: Source) -> list[Any]:
    """Return the content of each file in ``digests``. Raise DamagedFileError if a file has another MD5 digest."""
    contents = []
    for name, digest in digests.items():
        path = folder / name
        with as_file_error(path, "to be the published file", source.remedy), open_file(path) as file:
            actual_digest = hashlib.file_digest(file, "md5").hexdigest()
            check(actual_digest == digest, f"a file with MD5 {actual_digest}")
        contents.append(read_restricted_pickle(path, source.remedy))
    return contents


def _pixels(parts: list[Any], size: int) -> NDArray[np.uint8]:
    # A row of a file contains all red values, then green, then blue.
    pixels = np.concatenate([array_from_pickle(part["data"]).reshape(-1, 3, 32, 32) for part in parts])
    return pixels if size == 32 else resize_all((image.transpose(1, 2, 0) for image in pixels), len(pixels), size)


# The split in the authors' code. With CIFAR-100's numbers of superclasses, 1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18 and 19
# are for training, 8, 11, 13 and 16 for validation, and 0, 7, 12 and 14 for testing.
SUPERCLASSES = (
    *("fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices"),
    *("household_furniture", "large_man-made_outdoor_things", "large_natural_outdoor_scenes", "reptiles", "trees"),
    *("vehicles_1", "vehicles_2"),
    *("large_carnivores", "large_omnivores_and_herbivores", "non-insect_invertebrates", "small_mammals"),
    *("aquatic_mammals", "insects", "medium_mammals", "people"),
)


def load_fc100(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> ArrayDataset:
    """Load FC100 (Fewshot-CIFAR100): the images of CIFAR-100, with the classes grouped by superclass.

    The split is from Oreshkin et al. 2018, "TADAM: task dependent adaptive metric for improved few-shot learning",
    NeurIPS. The paper uses 12 superclasses for training, 4 for validation and 4 for testing, so that the classes of
    different parts are not similar. The loader reads the files of CIFAR-100.

    The classes are in the order of the split, superclass by superclass. In the paper, different parts have different
    classes, for few-shot learning. Here, each class has the training and test images of CIFAR-100, as in the continual
    stream of all 100 classes in Zuo et al. 2024. Each block of ten consecutive classes contains two superclasses.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels to which the images are resized.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.

    Returns:
        A dataset with `x` of shape (n, 3, size, size).
    """
    at_least(1, size=size)
    pixels, labels, names, test = read_images(_FC100.find(root)[1], size)
    coarse = [names["coarse"].index(name) for name in SUPERCLASSES]
    order = [label for number in coarse for label in np.unique(labels["fine"][labels["coarse"] == number]).tolist()]
    classes = [names["fine"][label] for label in order]
    return photo_dataset(pixels, np.argsort(order)[labels["fine"]], classes, normalize, test)
