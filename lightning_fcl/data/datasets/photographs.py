"""Datasets of photographs: MiniImageNet, TinyImageNet and CORe50."""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

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
    check_int_range,
    numbered_paths,
    read_lines,
    read_npz,
)
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import as_file_error, check
from lightning_fcl.validation import at_least

_TINY_IMAGENET = SOURCES["tinyimagenet"]

# Images, labels, mask of the test images, and names of the classes.
_Photographs = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_], tuple[str, ...]]


def load_tinyimagenet(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> ArrayDataset:
    """Load TinyImageNet: photographs of 200 classes of ImageNet, 64 x 64 pixels.

    The dataset is from Le and Yang 2015, "Tiny ImageNet visual recognition challenge", Stanford CS 231N. Two layouts
    are supported. The loader first looks for the original folder ``tiny-imagenet-200``, and then for
    ``tinyimagenet32/100classes.npz``. The npz file has 100 of the classes, at 32 x 32 pixels and with 120 training
    images per class. The original test set has no labels. Therefore, the publishers' validation set is the official
    test set.

    All labeled images are loaded: first the training images by class, then the validation set. The classes are in the
    order of their WordNet ids. The complete set has 110000 images, and the npz file has 17000 images.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels to which the images are resized.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.

    Returns:
        A dataset with `x` of shape (n, 3, size, size).
    """
    at_least(1, size=size)
    layout, path = _TINY_IMAGENET.find(root)
    pixels, y, test, classes = (_tiny_from_npz if layout == "npz file" else _tiny_from_folder)(path, size)
    return photo_dataset(pixels, y, classes, normalize, test)


def _tiny_from_folder(folder: Path, size: int) -> _Photographs:
    wnids = sorted(set(read_lines(folder / "wnids.txt", _TINY_IMAGENET.remedy)))
    folders = [safe_join(folder / "train", wnid, "images") for wnid in wnids]
    train = [numbered_paths(one, r"n\d+_(\d+)\.JPEG") for one in folders]
    num_images = max(len(images) for images in train)
    for image_folder, images in zip(folders, train, strict=True):
        if not images or len(images) < num_images:
            raise InvalidValueError(
                f"Expected {image_folder} to contain {num_images or 500} images, like the other classes, but got "
                f"{len(images)}. The archive is only partly unpacked. {_TINY_IMAGENET.remedy}",
                value=image_folder,
            )
    path = folder / "val" / "val_annotations.txt"
    lines = read_lines(path, _TINY_IMAGENET.remedy)
    with as_file_error(path, "to name images and their classes", _TINY_IMAGENET.remedy):
        # Columns: file, class, and bounding box of the object.
        rows = [line.split("\t") for line in lines]
        test = [safe_join(folder / "val" / "images", name) for name, *_ in rows]
        labels = [wnids.index(row[1]) for row in rows]
    paths = [*(path for images in train for path in images), *test]
    pixels = resize_all((read_image(path, "JPEG", "RGB", (64, 64)) for path in paths), len(paths), size)
    y = np.concatenate([np.repeat(np.arange(len(wnids)), num_images), labels])
    return (
        pixels,
        y,
        np.arange(len(paths)) >= num_images * len(wnids),
        first_names(wnids, read_words(folder / "words.txt")),
    )


def read_words(path: Path) -> dict[str, str]:
    """Read a file with one WordNet id and its names per line. Return the names by WordNet id."""
    parts = (line.partition("\t") for line in read_lines(path, _TINY_IMAGENET.remedy))
    return {wnid: names for wnid, _, names in parts}


def first_names(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """Return the first name of each class. If several classes have the same name, add the WordNet id to these names."""
    first = [words.get(wnid, "").split(",")[0].strip() or wnid for wnid in wnids]
    return tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)
    )


def _tiny_from_npz(path: Path, size: int) -> _Photographs:
    spec: dict[str, tuple[str, tuple[int | str, ...]]] = {"wnids": ("U", ("classes",)), "names": ("U", ("classes",))}
    for split_name in ("train", "val"):
        spec |= {
            f"X_{split_name}": ("pixels", (f"{split_name} images", 32, 32, 3)),
            f"y_{split_name}": ("iu", (f"{split_name} images",)),
        }
    arrays = read_npz(path, spec, _TINY_IMAGENET.remedy)
    wnids, names = arrays["wnids"].tolist(), arrays["names"].tolist()
    y = np.concatenate([arrays["y_train"], arrays["y_val"]])
    y = check_int_range(y, len(wnids) - 1, f"labels of {path}", _TINY_IMAGENET.remedy)
    pixels = resize_all((image for part in ("train", "val") for image in arrays[f"X_{part}"]), len(y), size)
    classes = first_names(wnids, dict(zip(wnids, names, strict=True)))
    return pixels, y, np.arange(len(y)) >= len(arrays["y_train"]), classes


_LISTS = ("train.csv", "val.csv", "test.csv")
_NEW = ("new_train.csv", "new_val.csv")

_MINI_IMAGENET = SOURCES["miniimagenet"]

_REMEDY = "Delete this copy and get the files again."


def load_miniimagenet(root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet") -> ArrayDataset:
    """Load MiniImageNet: photographs of 100 classes of ImageNet, with 600 images per class.

    The dataset is from Vinyals et al. 2016, "Matching networks for one shot learning", NeurIPS. The classes and images
    are those of Ravi and Larochelle 2017, "Optimization as a model for few-shot learning", ICLR. Four layouts are
    supported. The loader looks for the layouts in this order:

    1. ``new_train.csv`` and ``new_val.csv`` of Zuo et al. 2024, with the images in ``images``. The lists name 480
       training and 120 test images of each class.
    2. ``train.csv``, ``val.csv`` and ``test.csv`` of Ravi and Larochelle, with the images in ``images``. The lists name
       the images of 64, 16 and 20 classes.
    3. A folder of images for each class.
    4. ``miniimagenet64/images.npz`` with all images at 64 x 64 pixels. Its training and test images are those of Zuo et
       al. 2024.

    The images of all classes are loaded, and can have any original size. The classes are in the order of their WordNet
    ids. Layouts 1 and 4 have an official test set of 120 images per class. Resized pixels are cached in the user's
    cache folder.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels. Images of any aspect ratio are resized to this square.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.

    Returns:
        A dataset with `x` of shape (n, 3, size, size).
    """
    at_least(1, size=size)
    layout, source_path = _MINI_IMAGENET.find(root)
    test = None
    if layout == "npz file":
        files, (wnids, test, images) = [source_path], _mini_from_npz(source_path)
    else:
        if layout == "new lists and images":
            train, tests = (_listed(source_path / name) for name in _NEW)
            rows, test = [*train, *tests], np.repeat([False, True], [len(train), len(tests)])
        elif layout == "lists and images":
            rows = [row for name in _LISTS for row in _listed(source_path / name)]
        else:  # one folder per class, or a folder such as `train` that contains one folder per class
            image_paths = sorted([*source_path.glob("n*/*.*"), *source_path.glob("*/n*/*.*")])
            class_paths = [path for path in image_paths if re.fullmatch(r"n\d{8}", path.parent.name)]
            rows = [(path, path.parent.name) for path in class_paths if path.suffix.lower() in (".jpg", ".jpeg")]
        files, wnids = [path for path, _ in rows], [wnid for _, wnid in rows]
        images = (read_image(path, "JPEG", "RGB") for path in files)
    pixels = resize_all_once(files, images, wnids, size)
    ids = sorted({*wnids})
    number = {wnid: i for i, wnid in enumerate(ids)}
    y = np.array([number[wnid] for wnid in wnids])
    # timm contains the names of ImageNet's classes. The package is not imported, because its import takes seconds.
    timm = importlib.util.find_spec("timm")
    words = {}
    if timm and timm.origin:
        words = read_words(Path(timm.origin).parent / "data" / "_info" / "imagenet_synset_to_lemma.txt")
    return photo_dataset(pixels, y, first_names(ids, words), normalize, test)


def _mini_from_npz(path: Path) -> tuple[list[str], NDArray[np.bool_], Iterator[NDArray[np.uint8]]]:
    """Return the WordNet id of each image, a mask of the test images, and the images, in this order."""
    spec: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "webp": ("pixels", ("bytes",)),
        "offsets": ("iu", ("bounds",)),
        "y": ("iu", ("images",)),
        "train": ("biu", ("images",)),
        "files": ("U", ("images",)),
        "wnids": ("U", ("classes",)),
    }
    arrays = read_npz(path, spec, _REMEDY)
    label = check_int_range(arrays["y"], len(arrays["wnids"]) - 1, f"`y` of {path}", _REMEDY)
    names = [f"{name}.webp" for name in arrays["files"]]
    images = packed_images(path, arrays, "webp", names, _REMEDY)
    return arrays["wnids"][label].tolist(), ~arrays["train"].astype(bool), images


def _listed(path: Path) -> list[tuple[Path, str]]:
    """Return pairs (path, WordNet id), one for each image in a list. The first line of the list is the header."""
    heading, *rest = read_lines(path, _REMEDY)
    rows = [line.partition(",")[::2] for line in rest]
    with as_file_error(
        path, "to start with `filename,label`, with lines like `n0153282900000005.jpg,n01532829`,", _REMEDY
    ):
        check(heading == "filename,label" and rest, f"{heading[:60]!r} and {len(rest)} more lines")
        for name, wnid in rows:
            fits = re.fullmatch(r"n\d{8}", wnid) and re.fullmatch(r"[\w-]+\.jpe?g", name, re.IGNORECASE)
            check(fits, repr(f"{name},{wnid}"[:60]))
    return [(safe_join(path.parent / "images", name), wnid) for name, wnid in rows]


_FOLDERS = {"core50_128x128": 128, "core50_32x32": 32}

_CORE50 = SOURCES["core50"]

_KINDS = (
    *("plug_adapter", "mobile_phone", "scissor", "light_bulb", "can"),
    *("glass", "ball", "marker", "cup", "remote_control"),
)
_OBJECTS = tuple(f"{kind}{number}" for kind in _KINDS for number in range(1, 6))
_SESSIONS = 11
_TEST = (3, 7, 10)


def load_core50(
    root: str | Path | None = None, size: int = 32, normalize: Scale = "imagenet", by_session: bool = False
) -> ArrayDataset:
    """Load CORe50: fifty hand-held objects, filmed in eleven sessions with different backgrounds.

    The dataset is from Lomonaco and Maltoni 2017, "CORe50: a new dataset and benchmark for continuous object
    recognition", CoRL. The loader reads the original folder ``core50_128x128``, or the smaller ``core50_32x32``, which
    has the same layout. The path of an image is ``s<session>/o<object>/C_<session>_<object>_<frame>.png``. Sessions 3,
    7 and 10 are the publishers' test set.

    All frames are loaded, session by session and object by object. The frames of one object in one session are a video
    of 20 frames per second. Neighboring frames are nearly identical. Therefore, a test set of random frames mostly
    measures memorization.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels to which the frames are resized. At 128 x 128 pixels, all 164866 frames need
            8 GB of memory, and reading them takes some minutes.
        normalize: Normalization of pixels. See `lightning_fcl.data.datasets.images.photo_dataset`.
        by_session: Whether an object is a different class in each session. If True, there are 550 classes, ordered by
            session, so that each block of 50 classes is one session. This is an interpretation of the 11 tasks of 50
            classes in Zuo et al. 2024. The dataset then has no official test set, because the classes of test sessions
            would have no training images.

    Returns:
        A dataset with `x` of shape (n, 3, size, size). `group` is the session of each frame.
    """
    at_least(1, size=size)
    folder = _CORE50.find(root)[1]
    frames = _frames(folder)
    paths = [path for own in frames.values() for path in own]
    session, thing = np.repeat(list(frames), [len(own) for own in frames.values()], axis=0).T
    side = _FOLDERS[folder.name]
    pixels = resize_all((read_image(path, "PNG", "RGB", (side, side)) for path in paths), len(paths), size)
    sessions, things = np.unique(session), np.unique(thing)
    y, names = np.searchsorted(things, thing), [_OBJECTS[number - 1] for number in things]
    if by_session:
        y = y + len(things) * np.searchsorted(sessions, session)
        names = [f"s{number} {name}" for number in sessions for name in names]
    test = None if by_session else np.isin(session, _TEST)
    return photo_dataset(pixels, y, names, normalize, test, group=session.astype(np.int64))


def _frames(folder: Path) -> dict[tuple[int, int], list[Path]]:
    frame_paths: dict[tuple[int, int], list[Path]] = {}
    for session in range(1, _SESSIONS + 1):
        for thing in range(1, len(_OBJECTS) + 1):
            pattern = rf"C_{session:02d}_{thing:02d}_(\d{{3}})\.png"
            if frames := numbered_paths(folder / f"s{session}" / f"o{thing}", pattern):
                frame_paths[session, thing] = frames
    for session, thing in (
        product(*(sorted(set(column)) for column in zip(*frame_paths, strict=True))) if frame_paths else [(1, 1)]
    ):
        if (session, thing) not in frame_paths:
            raise MissingValueError(
                f"Expected {folder / f's{session}' / f'o{thing}'} to contain frames such as "
                f"`C_{session:02d}_{thing:02d}_000.png`, but found no such file. The archive is only partly unpacked. "
                f"{_CORE50.remedy}",
                value=folder / f"s{session}" / f"o{thing}",
            )
    return frame_paths
