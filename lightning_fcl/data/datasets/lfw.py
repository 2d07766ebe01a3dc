"""Labeled Faces in the Wild: press photographs of people, cut to the face, in grey.

Huang et al. 2007, "Labeled Faces in the Wild: a database for studying face recognition in unconstrained environments",
University of Massachusetts, Amherst, TR 07-49; the funneled version: Huang, Jain and Learned-Miller 2007, "Unsupervised
joint alignment of complex images", ICCV. Two layouts are read, in this order: the original folders
``Name/Name_0001.jpg``, and ``lfw/min35_gray_64x48.npz`` with the people of 35 and more images.

Of the original images, 250 x 250 pixels, rows 70 to 194 and columns 78 to 171 are kept, as scikit-learn's
`fetch_lfw_people` does by default; how the npz file was cut is not known, so the two layouts differ in the pixels.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range, numbered_paths, read_npz
from lightning_fcl.data.datasets.images import FaceScale, check_faces, faces, read_image
from lightning_fcl.errors import at_least

_NPZ_SHAPE = (64, 48)
_NPZ_FACES = 35
_SHAPE = (250, 250)
_FACE = (slice(70, 195), slice(78, 172))

SOURCE = SOURCES["lfw"]


def load(
    root: str | Path | None = None,
    min_faces: int = 35,
    size: Sequence[int] = (64, 48),
    normalize: FaceScale = "image",
) -> Arrays:
    """Load the faces of all people with enough images, who are the classes.

    Args:
        min_faces: People with fewer images are left out. The npz file has nobody with fewer than 35.
        size: Height and width in pixels. The cut of 125 x 94, or the 64 x 48 of the npz file, is resized to it with
            Pillow's antialiased bicubic filter, so another aspect ratio than 4:3 distorts the faces.

    Returns:
        `x` of shape (n, 1, height, width); `classes` the people's names in alphabetical order.
    """
    check_faces(size)
    at_least(1, min_faces=min_faces)
    layout, path = SOURCE.find(root)
    images: Iterable[NDArray[np.uint8]]
    if layout == "npz file":
        if min_faces < _NPZ_FACES:
            raise ValueError(
                f"Expected `min_faces` to be at least {_NPZ_FACES}, as {path} has no people with fewer images, but got "
                f"{min_faces}. Pass {_NPZ_FACES} or more, or run {SOURCE.command} for the original images."
            )
        wanted = {"X": ("pixels", ("images", *_NPZ_SHAPE)), "y": ("iu", ("images",)), "names": ("U", ("people",))}
        arrays = read_npz(path, wanted)
        owner = arrays["names"][in_range(arrays["y"], len(arrays["names"]) - 1, f"`y` of {path}")]
        names, kept = _with_enough(owner, min_faces, path)
        images = arrays["X"][kept]
    else:
        people = {
            one.name: numbered_paths(one, rf"{re.escape(one.name)}_(\d{{4}})\.jpg") for one in sorted(path.glob("*/"))
        }
        paths = [image for own in people.values() for image in own]
        owner = np.repeat(list(people), list(map(len, people.values())))
        names, kept = _with_enough(owner, min_faces, path)
        images = (read_image(paths[n], "JPEG", "L", _SHAPE)[_FACE] for n in np.flatnonzero(kept))
    return faces(images, np.searchsorted(names, owner[kept]), names.tolist(), size, normalize)


def _with_enough(owner: NDArray[np.str_], min_faces: int, path: Path) -> tuple[NDArray[np.str_], NDArray[np.bool_]]:
    """The people with enough images, in alphabetical order, and which images are theirs."""
    names, counts = np.unique(owner, return_counts=True)
    if counts.max() < min_faces:
        raise ValueError(
            f"Expected `min_faces` to be at most {counts.max()}, the images of {names[counts.argmax()]}, who has most "
            f"in {path}, but got {min_faces}. Pass a smaller number."
        )
    chosen = names[counts >= min_faces]
    return chosen, np.isin(owner, chosen)
