"""Images: reading with checks and resizing; and the scaling of the grey ones of the data sets of faces."""

import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.archives import read_npz

__all__ = [
    "Normalize",
    "batch",
    "centre",
    "read_colour",
    "read_grey",
    "read_labelled",
    "require_normalize",
    "require_size",
    "resized",
]

Normalize = Literal["none", "image"]

_REMEDY = "Delete this copy and get the file again."
# What an image of 8 bits per channel is to Pillow, by what is made of it; a few photographs of ImageNet are CMYK.
_MODES = {"L": ("L", "RGB"), "RGB": ("L", "RGB", "CMYK")}


def require_normalize(normalize: str) -> None:
    """Refuse a scaling that is not known.

    Args:
        normalize: ``"none"`` or ``"image"``.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> require_normalize("images")
        Traceback (most recent call last):
        ValueError: Expected `normalize` to be 'none' or 'image' but got 'images'. Choose one of these.
    """
    if normalize not in ("none", "image"):
        raise ValueError(f"Expected `normalize` to be 'none' or 'image' but got {normalize!r}. Choose one of these.")


def require_size(size: Sequence[int]) -> None:
    """Refuse a size that is not height and width in pixels.

    Args:
        size: Height and width.

    Raises:
        ValueError: If these are not two positive whole numbers.

    Example:
        >>> require_size((64, 0))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Expected `size` to be two positive whole numbers, height and width, but got (64, 0). ...
    """
    # A bool is an int to Python, hence `type`.
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(
            f"Expected `size` to be two positive whole numbers, height and width, but got {size!r}. Pass, for example, "
            "(64, 48)."
        )


def read_grey(path: Path, file_format: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Read an image of 8 bits per channel as grey; colours become ITU-R 601-2 luma.

    Args:
        path: The file.
        file_format: The only format that is read, by Pillow's name: ``"JPEG"``, or ``"PPM"``, to which PGM belongs.
        shape: Height and width that the image must have. They stand in its header, so that a wrong image of any size
            is refused before it takes memory.

    Returns:
        The pixels, of the given shape.

    Raises:
        ValueError: If the file cannot be read, is cut short, or has another size or depth.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "1.pgm"
        >>> _ = path.write_bytes(b"P5 3 2 255 abcdef")
        >>> read_grey(path, "PPM", (2, 3)).tolist()
        [[97, 98, 99], [100, 101, 102]]
    """
    return _read(path, file_format, shape, "L")


def read_colour(path: Path, file_format: str, shape: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Read an image of 8 bits per channel in colour; grey becomes three equal channels.

    Args:
        path: The file.
        file_format: The only format that is read, by Pillow's name: ``"JPEG"`` or ``"PNG"``.
        shape: Height and width that the image must have; None: any.

    Returns:
        The pixels, of shape (height, width, 3): red, green, blue.

    Raises:
        ValueError: If the file cannot be read, is cut short, or has another size or depth.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "1.ppm"
        >>> _ = path.write_bytes(b"P6 2 1 255 abcdef")
        >>> read_colour(path, "PPM").tolist()
        [[[97, 98, 99], [100, 101, 102]]]
    """
    return _read(path, file_format, shape, "RGB")


def _read(path: Path, file_format: str, shape: tuple[int, int] | None, wanted: str) -> NDArray[np.uint8]:
    from PIL import Image

    # A damaged header can end in most of these, whatever the format.
    broken = (ArithmeticError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
    try:
        with Image.open(path, formats=[file_format]) as image:
            found, mode = (image.height, image.width), image.mode
            fits = shape in (None, found) and mode in _MODES[wanted]
            pixels = np.asarray(image.convert(wanted)) if fits else np.empty(0, np.uint8)
    except (*broken, Image.DecompressionBombError) as error:
        raise ValueError(f"Expected {path} to be a whole {file_format} image but got: {error}. {_REMEDY}") from error
    if not fits:
        size = "" if shape is None else f"of height {shape[0]} and width {shape[1]} "
        raise ValueError(
            f"Expected {path} to be an image {size}with 8 bits of grey or colour, "
            f"as all of the original data, but got {found[0]} x {found[1]} in Pillow's mode {mode!r}. {_REMEDY}"
        )
    return pixels


def read_labelled(
    path: Path, shape: tuple[int, int], names: Sequence[str] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Read images, labels and the names of these from an npz file.

    Args:
        path: The file, with arrays ``X`` and ``y``, and ``names`` if no names are given.
        shape: Height and width of the images.
        names: The names of the labels from 0.

    Returns:
        Images of shape (n, height, width), labels of shape (n,), and the names.

    Raises:
        ValueError: If the file is damaged, holds no images, or a label has no name.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(path, X=np.zeros((3, 4, 2), np.uint8), y=[0, 1, 1], names=["Ann", "Bob"])
        >>> pixels, y, names = read_labelled(path, (4, 2))
        >>> pixels.shape, y.tolist(), names
        ((3, 4, 2), [0, 1, 1], ['Ann', 'Bob'])
    """
    wanted: dict[str, tuple[str, tuple[int | str, ...]]] = {"X": ("u", ("images", *shape)), "y": ("iu", ("images",))}
    arrays = read_npz(path, wanted if names is not None else {**wanted, "names": ("U", ("people",))})
    pixels = arrays["X"]
    if pixels.dtype != np.uint8 or not len(pixels):
        raise ValueError(
            f"Expected `X` of {path} to hold uint8 images but got {len(pixels)} of {pixels.dtype}. {_REMEDY}"
        )
    known = [str(name) for name in (arrays["names"] if names is None else names)]
    wrong = np.flatnonzero((arrays["y"] < 0) | (arrays["y"] >= len(known)))
    if wrong.size:
        raise ValueError(
            f"Expected `y` of {path} to be between 0 and {len(known) - 1} but got {arrays['y'][wrong[0]]} in sample "
            f"{wrong[0]}. {_REMEDY}"
        )
    return pixels, arrays["y"].astype(np.int64), known


def centre(image: NDArray[np.uint8], size: Sequence[int]) -> NDArray[np.uint8]:
    """Cut the largest middle part that has the aspect ratio of a size, to the nearest whole pixel.

    Args:
        image: Pixels of shape (height, width).
        size: Height and width whose ratio is wanted.

    Returns:
        The middle part, as high or as wide as the image. Where an odd number of lines is cut off, one more of them is
        at the bottom or the right.

    Example:
        >>> centre(np.zeros((112, 92), np.uint8), (64, 48)).shape
        (112, 84)
    """
    height, width = image.shape
    scale = min(height / size[0], width / size[1])
    kept = [max(1, round(scale * wanted)) for wanted in size]
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    return image[top : top + kept[0], left : left + kept[1]]


def resized(image: NDArray[np.uint8], size: Sequence[int] | None) -> NDArray[np.uint8]:
    """Resize an image by Pillow's bicubic filter, which is antialiased; the aspect ratio is not kept.

    Args:
        image: Pixels of shape (height, width) or (height, width, 3).
        size: Height and width. None, or the size that the image has, leaves its pixels as they are.

    Returns:
        The pixels, of the new height and width.

    Example:
        >>> resized(np.zeros((6, 8, 3), np.uint8), (2, 4)).shape
        (2, 4, 3)
    """
    if size is None or image.shape[:2] == tuple(size):
        return image
    from PIL import Image

    height, width = (int(number) for number in size)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def batch(images: Iterable[NDArray[np.uint8]], size: Sequence[int] | None, normalize: Normalize) -> NDArray[np.float32]:
    """Resize and scale grey images one by one and stack them.

    Args:
        images: Pixels of shape (height, width) each, at least one image.
        size: Height and width to resize to, see `resized`.
        normalize: ``"image"`` gives each image a mean of zero and a variance of one, and a constant image zeros;
            ``"none"`` scales 0..255 to 0..1.

    Returns:
        The images, of shape (n, 1, height, width).

    Example:
        >>> batch([np.array([[0, 255]], np.uint8)], None, "image").tolist()
        [[[[-1.0, 1.0]]]]
    """
    return np.stack([_scaled(resized(image, size), normalize)[np.newaxis] for image in images])


def _scaled(image: NDArray[np.uint8], normalize: Normalize) -> NDArray[np.float32]:
    if normalize == "none":
        return (image / 255).astype(np.float32)
    # In whole numbers up to 255 the mean of a constant image is exact, so that its rest is exactly zero.
    centred: NDArray[Any] = image - image.mean(dtype=np.float64)
    return (centred / (math.sqrt(np.square(centred).mean()) or 1.0)).astype(np.float32)
