"""Gray images of faces: ORL, taken in a laboratory, and Labeled Faces in the Wild, taken from press photographs."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset
from lightning_fcl.data.datasets.images import FaceScale, check_faces, face_dataset, read_image
from lightning_fcl.data.datasets.readers import SOURCES, check_int_range, numbered_paths, read_npz
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import at_least

_ORL = SOURCES["orl"]

_ORL_SHAPE = (112, 92)
_PEOPLE = 40


def load_orl(
    root: str | Path | None = None, size: Sequence[int] | None = (64, 48), normalize: FaceScale = "image"
) -> ArrayDataset:
    """Load the ORL (AT&T) faces: ten gray images of each of 40 people, made in a laboratory.

    The dataset is from Samaria and Harter 1994, "Parameterisation of a stochastic model for human face identification",
    WACV. Two layouts are supported. The loader first looks for the original folders ``s1/1.pgm`` to ``s40/10.pgm``, and
    then for ``orl/faces.npz``.

    All images in the folder are loaded. Each person is a class.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        size: Height and width in pixels. The loader crops the largest central part with this aspect ratio. For 4:3,
            this part has 112 x 84 of the 112 x 92 pixels. The part is resized with Pillow's antialiased bicubic filter.
            None keeps 112 x 92 pixels.
        normalize: ``"image"`` scales each image to mean 0 and variance 1. ``"none"`` returns values from 0 to 1.

    Returns:
        A dataset with `x` of shape (n, 1, height, width). Images from the original folders are ordered by person.
        `classes` are the names of the original folders, ``s1``, ``s2`` and so on.
    """
    check_faces(_ORL_SHAPE if size is None else size)
    layout, path = _ORL.find(root)
    if layout == "npz file":
        arrays = read_npz(path, {"X": ("pixels", ("images", *_ORL_SHAPE)), "y": ("iu", ("images",))})
        pixels, number = arrays["X"], check_int_range(arrays["y"], _PEOPLE - 1, f"`y` of {path}") + 1
    else:
        folders = {
            int(one.name[1:]): numbered_paths(one, r"([1-9]\d?)\.pgm") for one in numbered_paths(path, r"s([1-9]\d?)")
        }
        pixels = np.stack([read_image(file, "PPM", "L", _ORL_SHAPE) for own in folders.values() for file in own])
        number = np.repeat(list(folders), [len(own) for own in folders.values()])
    people, y = np.unique(number, return_inverse=True)
    if size is not None:
        # Cut the largest central part with this aspect ratio. If an odd number of rows or columns is cut, one more is
        # cut at the end.
        scale = min(_ORL_SHAPE[0] / size[0], _ORL_SHAPE[1] / size[1])
        height, width = (max(1, round(scale * wanted)) for wanted in size)
        first_row, first_column = (_ORL_SHAPE[0] - height) // 2, (_ORL_SHAPE[1] - width) // 2
        pixels = pixels[:, first_row : first_row + height, first_column : first_column + width]
    return face_dataset(pixels, y, [f"s{person}" for person in people], size, normalize)


_NPZ_SHAPE = (64, 48)
_NPZ_FACES = 35
_LFW_SHAPE = (250, 250)
_FACE = (slice(70, 195), slice(78, 172))

_LFW = SOURCES["lfw"]


def load_lfw(
    root: str | Path | None = None, min_faces: int = 35, size: Sequence[int] = (64, 48), normalize: FaceScale = "image"
) -> ArrayDataset:
    """Load Labeled Faces in the Wild: press photographs of people, in gray and cropped to the face.

    The dataset is from Huang et al. 2007, "Labeled Faces in the Wild: a database for studying face recognition in
    unconstrained environments", University of Massachusetts, Amherst, TR 07-49. The funneled version is from Huang,
    Jain and Learned-Miller 2007, "Unsupervised joint alignment of complex images", ICCV. Two layouts are supported. The
    loader first looks for the original folders ``Name/Name_0001.jpg``, and then for ``lfw/min35_gray_64x48.npz``. The
    npz file contains the people who have at least 35 images.

    The original images of 250 x 250 pixels are cropped to rows 70 to 194 and columns 78 to 171. This crop is the
    default of scikit-learn's `fetch_lfw_people`. The crop of the npz file is unknown, so the pixels of the two layouts
    differ.

    All people with enough images are loaded. Each person is a class.

    Args:
        root: Folder that contains the datasets. For the default, see `data_root`.
        min_faces: Minimum number of images per person. People with fewer images are left out. Must be at least 35 for
            the npz file, because this file contains no people with fewer images.
        size: Height and width in pixels. The crop of 125 x 94 pixels, or the image of 64 x 48 pixels in the npz file,
            is resized with Pillow's antialiased bicubic filter. Aspect ratios other than 4:3 distort the faces.
        normalize: ``"image"`` scales each image to mean 0 and variance 1. ``"none"`` returns values from 0 to 1.

    Returns:
        A dataset with `x` of shape (n, 1, height, width). `classes` are the people's names in alphabetical order.
    """
    check_faces(size)
    at_least(1, min_faces=min_faces)
    layout, path = _LFW.find(root)
    images: Iterable[NDArray[np.uint8]]
    if layout == "npz file":
        if min_faces < _NPZ_FACES:
            raise InvalidValueError(
                f"Expected `min_faces` to be at least {_NPZ_FACES}, because {path} contains no people with fewer "
                f"images, but got {min_faces}.",
                hint=f"Pass {_NPZ_FACES} or more, or run {_LFW.command} for the original images.",
                argument="min_faces",
                value=min_faces,
            )
        spec = {"X": ("pixels", ("images", *_NPZ_SHAPE)), "y": ("iu", ("images",)), "names": ("U", ("people",))}
        arrays = read_npz(path, spec)
        owner = arrays["names"][check_int_range(arrays["y"], len(arrays["names"]) - 1, f"`y` of {path}")]
        names, is_eligible = _with_enough(owner, min_faces, path)
        images = arrays["X"][is_eligible]
    else:
        people = {
            one.name: numbered_paths(one, rf"{re.escape(one.name)}_(\d{{4}})\.jpg") for one in sorted(path.glob("*/"))
        }
        paths = [image for own in people.values() for image in own]
        owner = np.repeat(list(people), list(map(len, people.values())))
        names, is_eligible = _with_enough(owner, min_faces, path)
        images = (read_image(paths[n], "JPEG", "L", _LFW_SHAPE)[_FACE] for n in np.flatnonzero(is_eligible))
    return face_dataset(images, np.searchsorted(names, owner[is_eligible]), names.tolist(), size, normalize)


def _with_enough(owner: NDArray[np.str_], min_faces: int, path: Path) -> tuple[NDArray[np.str_], NDArray[np.bool_]]:
    """Return the sorted names of people with at least ``min_faces`` images, and a mask of their images."""
    names, counts = np.unique(owner, return_counts=True)
    if counts.max() < min_faces:
        raise InvalidValueError(
            f"Expected `min_faces` to be at most {counts.max()}, the largest number of images per person in {path} "
            f"({names[counts.argmax()]}), but got {min_faces}.",
            hint="Pass a smaller number.",
            argument="min_faces",
            value=min_faces,
        )
    eligible_names = names[counts >= min_faces]
    return eligible_names, np.isin(owner, eligible_names)
