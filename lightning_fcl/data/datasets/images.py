"""Images: read with checks, resized and stacked, as pixels with the scale of photographs or as scaled grey faces."""

import hashlib
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import Arrays
from lightning_fcl.data.datasets.measurement import Measurement
from lightning_fcl.errors import one_of, require
from lightning_fcl.evaluation.files import cache_folder, write_whole
from lightning_fcl.hub.reading import AGAIN, check_size, reading

Scale = Literal["imagenet", "channel", "none"]
FaceScale = Literal["none", "image"]

# Mean and standard deviation of red, green and blue over ImageNet, as torchvision and timm have them.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# What an image of 8 bits per channel is to Pillow, by what is made of it; a few photographs of ImageNet are CMYK.
_MODES = {"L": ("L", "RGB"), "RGB": ("L", "RGB", "CMYK")}
# What people's own photographs are; others, such as EPS, would have another program called.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_STEP = 1024


def check_photographs(size: int, normalize: str) -> None:
    """Refuse a size of photographs, height and width in pixels, or a way of scaling that cannot be.

    Raises:
        ValueError: If the size is no positive whole number, or the scaling is none of `Scale`.

    Example:
        >>> check_photographs(32, "image")
        Traceback (most recent call last):
        ValueError: Expected `normalize` to be "imagenet", "channel" or "none" but got "image". Did you mean imagenet?
    """
    if type(size) is not int or size < 1:
        raise ValueError(
            f"Expected `size` to be a positive whole number, height and width in pixels, but got {size!r}. Pass, for "
            "example, 32."
        )
    one_of(("imagenet", "channel", "none"), normalize=normalize)


def check_faces(size: Sequence[int], normalize: str) -> None:
    """Refuse a size of faces, (height, width) in pixels, or a way of scaling that cannot be.

    Raises:
        ValueError: If the size is not two positive whole numbers, or the scaling is none of `FaceScale`.

    Example:
        >>> check_faces((64, 0), "image")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Expected `size` to be two positive whole numbers, height and width, but got (64, 0). ...
    """
    # A bool is an int to Python, hence `type`.
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(
            f"Expected `size` to be two positive whole numbers, height and width, but got {size!r}. Pass, for example, "
            "(64, 48)."
        )
    one_of(("none", "image"), normalize=normalize)


def read_image(
    path: Path,
    file_format: str | None,
    mode: Literal["L", "RGB"],
    shape: tuple[int, int] | None = None,
    content: bytes | None = None,
) -> NDArray[np.uint8]:
    """Read an image of 8 bits per channel; the checksums that a PNG file has are compared.

    Args:
        path: The file.
        file_format: The only format that is read, by Pillow's name: "JPEG", "PNG", or "PPM", to which PGM belongs.
            None: any usual format, of any depth.
        mode: ``"RGB"``: in colour, grey becomes three equal channels; ``"L"``: as grey, colours become ITU-R 601-2
            luma.
        shape: Height and width that the image must have. They stand in its header, so that a wrong image of any size
            is refused before it takes memory. None: any.
        content: What the file holds, where it lies within another one; None: what is at the path.

    Returns:
        The pixels, of shape (height, width, 3) in colour or (height, width) as grey.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it cannot be read, is cut short, too large, or has another size or depth.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "1.ppm"
        >>> _ = path.write_bytes(b"P6 2 1 255 abcdef")
        >>> read_image(path, "PPM", "RGB").tolist()
        [[[97, 98, 99], [100, 101, 102]]]
    """
    require("PIL.Image", "reads images")
    from PIL import Image, PngImagePlugin

    formats = [file_format] if file_format else list(_FORMATS)
    place = path if content is None else io.BytesIO(content)
    with reading(path, f"to be a whole {' or '.join(formats)} image"), Image.open(place, formats=formats) as image:
        found, its_mode = (image.height, image.width), image.mode
        check_size(4 * image.height * image.width, path.stat().st_size if content is None else len(content))
        fits = shape in (None, found) and (file_format is None or its_mode in _MODES[mode])
        if image.format == "PNG" and content is None:
            with path.open("rb") as file:
                file.seek(8)  # to the first chunk; loading compares the checksums of some only
                PngImagePlugin.ChunkStream(file).verify()
        pixels = np.asarray(image.convert(mode)) if fits else np.empty(0, np.uint8)
    if not fits:
        size = "" if shape is None else f"of height {shape[0]} and width {shape[1]} "
        raise ValueError(
            f"Expected {path} to be an image {size}with 8 bits of grey or colour, "
            f"as all of the original data, but got {found[0]} x {found[1]} in Pillow's mode {its_mode!r}. {AGAIN}"
        )
    return pixels


def _resized(image: NDArray[np.uint8], size: Sequence[int] | None) -> NDArray[np.uint8]:
    if size is None or image.shape[:2] == tuple(size):
        return image
    require("PIL.Image", "resizes images")
    from PIL import Image

    height, width = (int(number) for number in size)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def faces(images: Iterable[NDArray[np.uint8]], size: Sequence[int] | None, normalize: FaceScale) -> NDArray[np.float32]:
    """Resize and scale grey images one by one and stack them.

    Args:
        images: Pixels of shape (height, width) each, at least one image.
        size: Height and width to resize to, as `stacked` does; None: as they are.
        normalize: ``"image"`` gives each image a mean of zero and a variance of one, and a constant image zeros;
            ``"none"`` scales 0..255 to 0..1.

    Returns:
        The images, of shape (n, 1, height, width).

    Example:
        >>> faces([np.array([[0, 255]], np.uint8)], None, "image").tolist()
        [[[[-1.0, 1.0]]]]
    """
    return np.stack([_scaled(_resized(image, size), normalize)[np.newaxis] for image in images])


def _scaled(image: NDArray[np.uint8], normalize: FaceScale) -> NDArray[np.float32]:
    if normalize == "none":
        return (image / 255).astype(np.float32)
    # In whole numbers up to 255 the mean of a constant image is exact, so that its rest is exactly zero.
    centred: NDArray[Any] = image - image.mean(dtype=np.float64)
    return (centred / (math.sqrt(np.square(centred).mean()) or 1.0)).astype(np.float32)


def face_measurement(shape: tuple[int, ...], normalize: FaceScale) -> Measurement:
    """What `faces` takes, and how it scales.

    Args:
        shape: Of one of its images.
        normalize: As there.

    Example:
        >>> face_measurement((1, 64, 48), "image").describe()
        '1 channel x 64 height x 48 width: grey (of 255); scaled by the mean and deviation of each sample'
    """
    return Measurement(
        shape=shape,
        axes=("channel", "height", "width"),
        channels=("grey",),
        units=("of 255",),
        low=(0.0,),
        high=(255.0,),
        scaled_over="sample" if normalize == "image" else "data",
        mean=None if normalize == "image" else (0.0,),
        std=None if normalize == "image" else (255.0,),
    )


def stacked(images: Iterable[NDArray[np.uint8]], number: int, size: int) -> NDArray[np.uint8]:
    """Resize images in colour one by one and stack them, channels first.

    Args:
        images: Pixels of shape (height, width, 3) each.
        number: How many there are.
        size: Height and width to resize to by Pillow's antialiased bicubic filter, whatever the aspect ratio.

    Returns:
        The pixels, of shape (number, 3, size, size).

    Example:
        >>> stacked([np.zeros((8, 6, 3), np.uint8)], 1, 4).shape
        (1, 3, 4, 4)
    """
    pixels = np.empty((number, 3, size, size), np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[...] = _resized(image, (size, size)).transpose(2, 0, 1)
    return pixels


def stacked_once(
    files: Sequence[Path], images: Iterable[NDArray[np.uint8]], names: Sequence[str], size: int
) -> NDArray[np.uint8]:
    """`stacked`, of images in files: once resized they lie in the user's cache, until one of the files changes.

    Args:
        files: Where the images are.
        images: As `stacked` has them; not begun where they lie in the cache.
        names: A name for each image, by which others of the same files are told apart.
        size: Height and width to resize to.

    Raises:
        FileNotFoundError: If a file is missing.
    """
    told = hashlib.sha256("\n".join(names).encode())
    for path in files:
        with reading(path, "to be a file of images"):
            found = path.stat()
        told.update(f"\n{path.absolute()} {found.st_size} {found.st_mtime_ns}".encode())
    kept, shape = cache_folder() / "images" / f"{told.hexdigest()[:32]}-{size}", (len(names), 3, size, size)
    if kept.is_file() and kept.stat().st_size == math.prod(shape):
        return np.fromfile(kept, np.uint8).reshape(shape)
    pixels = stacked(images, len(names), size)
    with suppress(OSError):  # the next time it takes as long
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, pixels.tobytes())
    return pixels


def photographs(
    pixels: NDArray[np.uint8],
    y: NDArray[np.int64],
    classes: Sequence[str],
    normalize: Scale,
    test: NDArray[np.bool_] | None = None,
    group: NDArray[Any] | None = None,
) -> Arrays:
    """Photographs as a data set: bytes, with the mean and deviation that normalise them.

    Args:
        pixels: Shape (n, 3, height, width).
        y: Labels, shape (n,).
        classes: The names of the labels.
        normalize: ``"imagenet"`` subtracts the mean of ImageNet's red, green and blue from 0..1 and divides by their
            deviation; ``"channel"`` takes those of these images, the test set's left out; ``"none"`` leaves 0..1. A
            channel that is constant is only centred.
        test: Whether an image belongs to the publishers' test set, shape (n,); None: they have none.
        group: Natural domain of each image, shape (n,), or None.

    Returns:
        The data set.

    Example:
        >>> data = photographs(np.full((2, 3, 4, 4), 51, np.uint8), np.array([0, 1]), ("cat", "dog"), "none")
        >>> data.samples().shape, round(float(data.samples().max()), 3)
        ((2, 3, 4, 4), 0.2)
    """
    if normalize == "channel":
        mean, std = _channels(pixels if test is None or test.all() else pixels[~test])
    elif normalize == "imagenet":
        mean, std = (255 * np.array(values) for values in IMAGENET)
    else:
        mean, std = np.zeros(3), np.full(3, 255.0)
    scale = {name: v.reshape(3, 1, 1).astype(np.float32) for name, v in (("mean", mean), ("std", std))}
    measurement = Measurement(
        shape=pixels.shape[1:],
        axes=("channel", "height", "width"),
        channels=("red", "green", "blue"),
        units=("of 255",) * 3,
        low=(0.0,) * 3,
        high=(255.0,) * 3,
        mean=tuple(scale["mean"].ravel().tolist()),
        std=tuple(scale["std"].ravel().tolist()),
    )
    return Arrays(pixels, y.astype(np.int64), None, tuple(classes), test, group, **scale, measurement=measurement)


def _channels(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each channel, from sums of whole numbers, which are exact."""
    total, squares = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for first in range(0, len(pixels), _STEP):
        part = pixels[first : first + _STEP].astype(np.int64)
        total += part.sum(axis=(0, 2, 3))
        squares += np.square(part).sum(axis=(0, 2, 3))
    number = pixels.size // 3
    # n^2 var = n sum(x^2) - (sum x)^2; whole numbers of Python have no largest one.
    variance = [(number * int(s) - int(t) ** 2) / number**2 for s, t in zip(squares, total, strict=True)]
    deviation = np.sqrt(variance)
    return total / number, np.where(deviation > 0, deviation, 255.0)
