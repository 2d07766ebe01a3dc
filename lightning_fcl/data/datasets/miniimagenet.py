"""MiniImageNet: photographs of 100 classes of ImageNet, 600 of each.

Vinyals et al. 2016, "Matching networks for one shot learning", NeurIPS, with the classes and images of Ravi and
Larochelle 2017, "Optimization as a model for few-shot learning", ICLR. Four layouts are read, in this order:
``new_train.csv`` and ``new_val.csv`` of Zuo et al. 2024, which name 480 and 120 images of each class, those to train
and to test on; Ravi and Larochelle's ``train.csv``, ``val.csv`` and ``test.csv``, which name the images of 64, 16 and
20 classes; both with the images, of any size, in ``images``; a folder of images for each class; and
``miniimagenet64/images.npz``, all images at 64 x 64, with the 480 and 120.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range, read_lines, read_npz
from lightning_fcl.data.datasets.images import Scale, check_photographs, photographs, read_image, stacked_once
from lightning_fcl.data.datasets.tinyimagenet import first_names, read_words
from lightning_fcl.errors import one_of
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.hub.source import Layout, Source

_FILES = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
_NEW = ("new_train.csv", "new_val.csv")
_NPZ = "images.npz"
_PLACES = ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImagenet")

# The classes of Ravi and Larochelle's val.csv and test.csv; train.csv has the others.
_VALIDATION = """n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 n03075370 n03417042
    n03535780 n03584254 n03770439 n03773504 n03980874 n09256479"""
_TEST = """n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 n02443484 n02871525
    n03127925 n03146219 n03272010 n03544143 n03775546 n04146614 n04149813 n04418357 n04522168 n07613480"""

SOURCE = Source(
    name="miniimagenet",
    title="MiniImageNet",
    content="60000 photographs of 100 classes, 32 x 32 (the originals 84 x 84, or ImageNet's own sizes); 600 of each",
    licence="non-commercial research and education, ImageNet's terms",
    citation="Vinyals et al.: Matching networks for one shot learning. NeurIPS 2016",
    url="https://github.com/yaoyao-liu/mini-imagenet-tools",
    size="about 3 GB",
    # ImageNet's terms must be agreed to.
    by_hand="Get images and lists as {url} says and put them in {root}/miniimagenet, so that "
    "{root}/miniimagenet/train.csv, `val.csv`, `test.csv` and {root}/miniimagenet/images/n0153282900000005.jpg are "
    "there",
    layouts=(
        Layout("new lists and images", (*_PLACES, "."), signs=("images/", *_NEW)),
        Layout("lists and images", (*_PLACES, "."), signs=("images/", "|".join(_FILES.values()))),
        Layout(
            "folders of images", _PLACES, signs=("n*/*.*|*/n*/*.*",), strictly=r"([\w-]+/)?n\d{8}/.+\.[jJ][pP][eE]?[gG]"
        ),
        Layout("npz file", (f"miniimagenet64/{_NPZ}", f"miniimagenet/{_NPZ}")),
    ),
    holds=f"`miniimagenet` or `miniimagenet64/{_NPZ}`",
)

_REMEDY = "Delete this copy and get the files again."


def load(
    root: str | Path | None = None,
    size: int = 32,
    normalize: Scale = "imagenet",
    part: Literal["all", "train", "validation", "test"] = "all",
) -> Arrays:
    """Load the images of all classes, or of a part of these.

    The parts have no class in common: they are for learning to learn. A continual stream over all 100 classes, as that
    of Zuo et al. 2024, takes ``part="all"``, and where the layout tells their 480 training and 120 test images of each
    class, ``FederatedStream("miniimagenet", split=Split(test="official"))``; elsewhere a fifth does.

    Args:
        size: Height and width in pixels; each image is resized to it, whatever its aspect ratio, once: after that the
            pixels lie in the user's cache.
        normalize: See `lightning_fcl.data.datasets.images.photographs`.
        part: ``"all"`` classes, or those of one of Ravi and Larochelle's lists: 64 to ``"train"``, 16 for
            ``"validation"``, 20 to ``"test"``.

    Returns:
        `x` of shape (n, 3, size, size), pixels with their mean and deviation; `classes` in the order of their WordNet
        ids, by their first name; `official_test` the 120 of each class where the layout tells them.
    """
    check_photographs(size, normalize)
    one_of(("all", *_FILES), part=part)
    layout, place = SOURCE.find(root)
    test = None
    if layout == "npz file":
        files, (wnids, test, images) = [place], _from_npz(place, part)
    else:
        if layout == "new lists and images":
            train, tests = (_listed(place / name, part) for name in _NEW)
            rows, test = [*train, *tests], np.repeat([False, True], [len(train), len(tests)])
        elif layout == "lists and images":
            rows = [row for key, name in _FILES.items() if part in ("all", key) for row in _listed(place / name)]
        else:  # for each class one, perhaps below those of the parts
            found = sorted([*place.glob("n*/*.*"), *place.glob("*/n*/*.*")])
            own = [
                path for path in found if re.fullmatch(r"n\d{8}", path.parent.name) and _is_of(path.parent.name, part)
            ]
            rows = [(path, path.parent.name) for path in own if path.suffix.lower() in (".jpg", ".jpeg")]
        files, wnids = [path for path, _ in rows], [wnid for _, wnid in rows]
        images = (read_image(path, "JPEG", "RGB") for path in files)
    if not wnids:
        raise ValueError(f'Expected {place} to hold images of part "{part}" but it has none. {_REMEDY}')
    pixels = stacked_once(files, images, wnids, size)
    ids, y = np.unique(wnids, return_inverse=True)
    timm = importlib.util.find_spec("timm")  # has a list of ImageNet's names; to import it would take seconds
    listing = (
        Path(timm.origin).parent / "data" / "_info" / "imagenet_synset_to_lemma.txt" if timm and timm.origin else None
    )
    return photographs(pixels, y, first_names(ids.tolist(), read_words(listing) if listing else {}), normalize, test)


def _is_of(wnid: str, part: str) -> bool:
    known = {"validation": _VALIDATION, "test": _TEST}
    return part in ("all", next((name for name, wnids in known.items() if wnid in wnids), "train"))


def _from_npz(path: Path, part: str) -> tuple[list[str], NDArray[np.bool_], Iterator[NDArray[np.uint8]]]:
    """The classes of the images, which are tests, and the images themselves."""
    wanted: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "webp": ("pixels", ("bytes",)),
        "offsets": ("iu", ("bounds",)),
        "y": ("iu", ("images",)),
        "train": ("biu", ("images",)),
        "files": ("U", ("images",)),
        "wnids": ("U", ("classes",)),
    }
    arrays = read_npz(path, wanted, _REMEDY)
    webp, offsets, wnids = arrays["webp"], arrays["offsets"].astype(np.int64), arrays["wnids"]
    bounds = [0, *offsets[1:-1].tolist(), len(webp)]
    if offsets.tolist() != bounds or len(bounds) != len(arrays["y"]) + 1 or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"Expected `offsets` of {path} to cut the {len(webp)} bytes of `webp` into {len(arrays['y'])} images but "
            f"got {len(offsets)} bounds from {bounds[0]} to {offsets[-1]}. {_REMEDY}"
        )
    names = wnids[in_range(arrays["y"], len(wnids) - 1, f"`y` of {path}", _REMEDY)]
    chosen = np.flatnonzero([_is_of(name, part) for name in names])
    files = arrays["files"]
    images = (
        read_image(path / f"{files[n]}.webp", "WEBP", "RGB", content=webp[offsets[n] : offsets[n + 1]].tobytes())
        for n in chosen
    )
    return names[chosen].tolist(), ~arrays["train"][chosen].astype(bool), images


def _listed(path: Path, part: str = "all") -> list[tuple[Path, str]]:
    """The images of a part that a list names, and their classes; its first line is the heading."""
    heading, *rest = read_lines(path, _REMEDY)
    if heading.split(",") != ["filename", "label"] or not rest:
        raise ValueError(
            f"Expected {path} to begin with the line `filename,label` and to name images but got {heading[:60]!r} and "
            f"{len(rest)} more lines. {_REMEDY}"
        )
    rows = []
    for number, line in enumerate(rest, start=2):
        name, _, wnid = line.partition(",")
        if not re.fullmatch(r"n\d{8}", wnid) or not re.fullmatch(r"[\w-]+\.jpe?g", name, re.IGNORECASE):
            raise ValueError(
                f"Expected line {number} of {path} to name an image and its class, as in "
                f"`n0153282900000005.jpg,n01532829`, but got {line[:60]!r}. {_REMEDY}"
            )
        if _is_of(wnid, part):
            rows.append((inside(path.parent / "images", name), wnid))
    return rows
