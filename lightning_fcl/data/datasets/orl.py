"""ORL (AT&T) faces: ten grey images each of 40 people, taken in a laboratory.

Samaria and Harter 1994, "Parameterisation of a stochastic model for human face identification", WACV. Two layouts are
read, in this order: the original folders ``s1/1.pgm`` to ``s40/10.pgm``, and ``orl/faces.npz``.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_fcl.data.datasets import SOURCES
from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.files import in_range, numbered_paths, read_npz
from lightning_fcl.data.datasets.images import FaceScale, check_faces, faces, read_image

SOURCE = SOURCES["orl"]

_SHAPE = (112, 92)
_PEOPLE = 40


def load(
    root: str | Path | None = None,
    size: Sequence[int] | None = (64, 48),
    normalize: FaceScale = "image",
) -> Arrays:
    """Load the faces of all people that are there, who are the classes.

    Args:
        size: Height and width in pixels. The middle part of this aspect ratio (112 x 84 of 112 x 92 for 4:3) is resized
            to it with Pillow's antialiased bicubic filter. None keeps 112 x 92.

    Returns:
        `x` of shape (n, 1, height, width), person by person; `classes` the original folders ``s1``, ``s2`` and so on.
    """
    check_faces(_SHAPE if size is None else size)
    layout, path = SOURCE.find(root)
    if layout == "npz file":
        arrays = read_npz(path, {"X": ("pixels", ("images", *_SHAPE)), "y": ("iu", ("images",))})
        pixels, number = arrays["X"], in_range(arrays["y"], _PEOPLE - 1, f"`y` of {path}") + 1
    else:
        folders = {
            int(one.name[1:]): numbered_paths(one, r"([1-9]\d?)\.pgm") for one in numbered_paths(path, r"s([1-9]\d?)")
        }
        pixels = np.stack([read_image(file, "PPM", "L", _SHAPE) for own in folders.values() for file in own])
        number = np.repeat(list(folders), [len(own) for own in folders.values()])
    people, y = np.unique(number, return_inverse=True)
    if size is not None:
        # The largest middle part of the size's aspect ratio; of an odd number of lines, one more is cut off at the end.
        scale = min(_SHAPE[0] / size[0], _SHAPE[1] / size[1])
        height, width = (max(1, round(scale * wanted)) for wanted in size)
        top, left = (_SHAPE[0] - height) // 2, (_SHAPE[1] - width) // 2
        pixels = pixels[:, top : top + height, left : left + width]
    return faces(pixels, y, [f"s{person}" for person in people], size, normalize)
