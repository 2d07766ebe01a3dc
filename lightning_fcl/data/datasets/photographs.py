"""Photographs as pixels: stacked in one array of bytes, with the mean and deviation that normalise them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.images import resized

__all__ = ["IMAGENET", "Normalize", "Photographs", "lines", "require_labels", "require_options", "stacked"]

Normalize = Literal["imagenet", "channel", "none"]

# Mean and standard deviation of red, green and blue over ImageNet, as torchvision and timm have them.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_NORMALIZE = ("imagenet", "channel", "none")
_STEP = 1024


def require_options(size: int, normalize: str) -> None:
    """Refuse a size or a scaling that cannot be.

    Args:
        size: Height and width in pixels.
        normalize: ``"imagenet"``, ``"channel"`` or ``"none"``.

    Raises:
        ValueError: If the size is no positive whole number, or the scaling is not known.

    Example:
        >>> require_options(32, "image")
        Traceback (most recent call last):
        ValueError: Expected `normalize` to be 'imagenet', 'channel' or 'none' but got 'image'. Choose one of these.
    """
    if type(size) is not int or size < 1:
        raise ValueError(
            f"Expected `size` to be a positive whole number, height and width in pixels, but got {size!r}. Pass, for "
            "example, 32."
        )
    if normalize not in _NORMALIZE:
        raise ValueError(
            f"Expected `normalize` to be 'imagenet', 'channel' or 'none' but got {normalize!r}. Choose one of these."
        )


def stacked(images: Iterable[NDArray[np.uint8]], number: int, size: int) -> NDArray[np.uint8]:
    """Resize images one by one and stack them, channels first.

    Args:
        images: Pixels of shape (height, width, 3) each.
        number: How many there are.
        size: Height and width to resize to, see `lightning_fcl.data.datasets.images.resized`.

    Returns:
        The pixels, of shape (number, 3, size, size).

    Example:
        >>> stacked([np.zeros((8, 6, 3), np.uint8)], 1, 4).shape
        (1, 3, 4, 4)
    """
    pixels = np.empty((number, 3, size, size), np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[...] = resized(image, (size, size)).transpose(2, 0, 1)
    return pixels


@dataclass(frozen=True, eq=False)
class Photographs:
    """All images of a data set, as they were read.

    Args:
        pixels: Shape (n, 3, height, width), uint8.
        y: Labels, shape (n,).
        test: Whether an image belongs to the publishers' test set, shape (n,); None: they have none.
        classes: The names of the labels.

    Example:
        >>> pixels = np.full((2, 3, 4, 4), 51, np.uint8)
        >>> data = Photographs(pixels, np.array([0, 1]), None, ("cat", "dog")).arrays("none")
        >>> data.samples().shape, round(float(data.samples().max()), 3)
        ((2, 3, 4, 4), 0.2)
    """

    pixels: NDArray[np.uint8]
    y: NDArray[np.int64]
    test: NDArray[np.bool_] | None
    classes: tuple[str, ...]

    def arrays(self, normalize: Normalize, group: NDArray[Any] | None = None) -> Arrays:
        """The images as a data set.

        Args:
            normalize: ``"imagenet"`` subtracts the mean of ImageNet's red, green and blue from 0..1 and divides by
                their deviation; ``"channel"`` takes those of these images, the test set's left out; ``"none"`` leaves
                0..1. A channel that is constant is only centred.
            group: Natural domain of each image, shape (n,), or None.

        Returns:
            The images as bytes, with their mean and deviation.
        """
        if normalize == "channel":
            mean, std = _channels(self.pixels if self.test is None or self.test.all() else self.pixels[~self.test])
        elif normalize == "imagenet":
            mean, std = (255 * np.array(values) for values in IMAGENET)
        else:
            mean, std = np.zeros(3), np.full(3, 255.0)
        return Arrays(
            x=self.pixels,
            y=self.y,
            client=None,
            classes=self.classes,
            official_test=self.test,
            group=group,
            mean=mean.reshape(3, 1, 1).astype(np.float32),
            std=std.reshape(3, 1, 1).astype(np.float32),
        )


def _channels(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each channel, from sums of whole numbers, which are exact."""
    total, squares = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for first in range(0, len(pixels), _STEP):
        part = pixels[first : first + _STEP].astype(np.int64)
        total += part.sum(axis=(0, 2, 3))
        squares += np.square(part).sum(axis=(0, 2, 3))
    number = pixels.size // 3
    mean = total / number
    # n^2 var = n sum(x^2) - (sum x)^2; whole numbers of Python have no largest one.
    variance = [(number * int(s) - int(t) ** 2) / number**2 for s, t in zip(squares, total, strict=True)]
    deviation = np.sqrt(variance)
    return mean, np.where(deviation > 0, deviation, 255.0)


def lines(path: Path, remedy: str) -> list[str]:
    r"""The lines of a text file that are not empty.

    Args:
        path: The file.
        remedy: What to do if it is missing or no text.

    Returns:
        The lines, without white space at their ends.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is no text or has no lines.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "wnids.txt"
        >>> _ = path.write_text("n01443537\n\nn01629819\n")
        >>> lines(path, "Get it again.")
        ['n01443537', 'n01629819']
    """
    try:
        found = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Expected the file {path} but it is missing. {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected {path} to be a text file but got: {error}. {remedy}") from error
    if not found:
        raise ValueError(f"Expected {path} to have lines but it is empty. {remedy}")
    return found


def require_labels(y: NDArray[Any], number: int, name: str, path: Path, remedy: str) -> NDArray[np.int64]:
    """Refuse labels that are not the number of a class.

    Args:
        y: Labels, whole numbers.
        number: Number of classes.
        name: What the labels are called in the file.
        path: The file.
        remedy: What to do.

    Returns:
        The labels, int64.

    Raises:
        ValueError: If one is out of range.

    Example:
        >>> require_labels(np.array([0, 3]), 3, "y", Path("a.npz"), "Get it again.")
        Traceback (most recent call last):
        ValueError: Expected `y` of a.npz to be between 0 and 2 but got 3 in sample 1. Get it again.
    """
    wrong = np.flatnonzero((y < 0) | (y >= number))
    if wrong.size:
        raise ValueError(
            f"Expected `{name}` of {path} to be between 0 and {number - 1} but got {y[wrong[0]]} in sample {wrong[0]}. "
            f"{remedy}"
        )
    return y.astype(np.int64)
