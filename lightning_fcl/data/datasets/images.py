"""Images: read with checks, resized and stacked, as pixels with the scale of photographs or as scaled grey faces."""

import hashlib
import io
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.arrays import ArrayDataset, Measurement, ScalingScope
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import as_file_error, check, check_size, open_file, regular_file
from lightning_fcl.validation import require_package

Scale = Literal["imagenet", "channel", "none"]
FaceScale = Literal["none", "image"]

AXES = ("channel", "height", "width")

# Mean and standard deviation of red, green and blue over ImageNet, as torchvision and timm have them.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# What an image of 8 bits per channel is to Pillow, by what is made of it; a few photographs of ImageNet are CMYK.
_MODES = {"L": ("L", "RGB"), "RGB": ("L", "RGB", "CMYK")}
# What people's own photographs are; others, such as EPS, would have another program called.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def check_faces(size: Sequence[int]) -> None:
    # A bool is an int to Python, hence `type`.
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise InvalidValueError(
            f"Expected `size` to be two positive whole numbers, height and width, but got {size!r}.",
            hint="Pass, for example, (64, 48).",
            argument="size",
            value=size,
        )


def read_image(
    path: Path,
    file_format: str | None,
    mode: Literal["L", "RGB"],
    shape: tuple[int, int] | None = None,
    content: bytes | None = None,
) -> NDArray[np.uint8]:
    """An image of 8 bits per channel, shape (height, width, 3) or (height, width); a PNG's checksums are compared.

    Args:
        file_format: The only format that is read, by Pillow's name; None: any usual one, of any depth.
        mode: ``"RGB"``: grey becomes three equal channels; ``"L"``: colours become grey, by ITU-R 601-2 luma.
        shape: Height and width that the image must have by its header, before it takes memory.
        content: What the file holds, where it lies within another one.
    """
    require_package("PIL.Image", "reads images")
    from PIL import Image, PngImagePlugin

    formats = [file_format] if file_format else list(_FORMATS)
    description = f"to be a whole {' or '.join(formats)} image" + (f" of {shape[0]} x {shape[1]}" if shape else "")
    with (
        as_file_error(path, description),
        open_file(path) if content is None else io.BytesIO(content) as file,
        Image.open(file, formats=formats) as image,
    ):
        packed = os.fstat(file.fileno()).st_size if content is None else len(content)
        check_size(4 * image.height * image.width, packed)
        fits = shape in (None, (image.height, image.width)) and (file_format is None or image.mode in _MODES[mode])
        check(fits, f"one of {image.height} x {image.width} in Pillow's mode {image.mode!r}")
        if image.format == "PNG" and content is None:
            with open_file(path) as chunks:
                chunks.seek(8)  # to the first chunk; loading compares the checksums of some only
                PngImagePlugin.ChunkStream(chunks).verify()
        return np.asarray(image.convert(mode))


def _resized(image: NDArray[np.uint8], size: Sequence[int] | None) -> NDArray[np.uint8]:
    if size is None or image.shape[:2] == tuple(size):
        return image
    require_package("PIL.Image", "resizes images")
    from PIL import Image

    height, width = (int(number) for number in size)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def face_dataset(
    images: Iterable[NDArray[np.uint8]],
    y: NDArray[Any],
    classes: Sequence[str],
    size: Sequence[int] | None,
    normalize: FaceScale,
) -> ArrayDataset:
    """Grey images of shape (height, width) as a data set, resized as `resize_all` does unless ``size`` is None.

    ``normalize="image"`` gives each image a mean of zero and a variance of one, and a constant image zeros; ``"none"``
    scales 0..255 to 0..1.
    """
    x = []
    for image in images:
        pixels = _resized(image, size)
        if normalize == "none":
            x.append((pixels / 255).astype(np.float32))
            continue
        # In whole numbers up to 255 the mean of a constant image is exact, so that its rest is exactly zero.
        centred: NDArray[Any] = pixels - pixels.mean(dtype=np.float64)
        x.append((centred / (math.sqrt(np.square(centred).mean()) or 1.0)).astype(np.float32))
    stack = np.stack(x)[:, np.newaxis]
    scope: ScalingScope = "data" if normalize == "none" else "sample"
    scale = {"mean": [0.0], "std": [255.0]} if normalize == "none" else {}
    measurement = Measurement.from_sensors(
        [("grey", "of 255", 0.0, 255.0)], stack.shape[1:], AXES, None, scope, **scale
    )
    return ArrayDataset(stack, y.astype(np.int64), None, tuple(classes), measurement=measurement)


def resize_all(images: Iterable[NDArray[np.uint8]], number: int, size: int) -> NDArray[np.uint8]:
    """Images of shape (height, width, 3) resized by Pillow's antialiased bicubic filter and stacked, channels first."""
    pixels = np.empty((number, 3, size, size), np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[...] = _resized(image, (size, size)).transpose(2, 0, 1)
    return pixels


def resize_all_once(
    files: Sequence[Path], images: Iterable[NDArray[np.uint8]], names: Sequence[str], size: int
) -> NDArray[np.uint8]:
    """`resize_all`, of images in files: once resized they lie in the user's cache, until one of the files changes.

    Each image has one of ``names``, by which others of the same files are told apart.
    """
    digest = hashlib.sha256("\n".join(names).encode())
    for path in files:
        with as_file_error(path, "to be a file of images"):
            file_stat = path.stat()
        digest.update(f"\n{path.absolute()} {file_stat.st_size} {file_stat.st_mtime_ns}".encode())
    cache_path, shape = cache_folder() / "images" / f"{digest.hexdigest()[:32]}-{size}", (len(names), 3, size, size)
    if cache_path.is_file() and cache_path.stat().st_size == math.prod(shape):
        return np.fromfile(regular_file(cache_path), np.uint8).reshape(shape)
    pixels = resize_all(images, len(names), size)
    with suppress(OSError):  # the next time it takes as long
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache_path, pixels.tobytes())
    return pixels


def photo_dataset(
    pixels: NDArray[np.uint8],
    y: NDArray[np.int64],
    classes: Sequence[str],
    normalize: Scale,
    test: NDArray[np.bool_] | None = None,
    group: NDArray[Any] | None = None,
) -> ArrayDataset:
    """Photographs, shape (n, 3, height, width), as a data set: bytes, with the mean and deviation that normalise them.

    ``normalize="imagenet"`` subtracts the mean of ImageNet's red, green and blue from 0..1 and divides by their
    deviation; ``"channel"`` takes those of these images, the test set's left out; ``"none"`` leaves 0..1. A channel
    that is constant is only centred.
    """
    if normalize == "channel":
        train_pixels = pixels if test is None or test.all() else pixels[~test]
        number, total = train_pixels.size // 3, train_pixels.sum(axis=(0, 2, 3), dtype=np.int64)
        squares = np.einsum("nchw,nchw->c", train_pixels, train_pixels, dtype=np.int64)
        # n^2 var = n sum(x^2) - (sum x)^2, exactly: whole numbers of Python have no largest one.
        variance = [(number * int(s) - int(t) ** 2) / number**2 for s, t in zip(squares, total, strict=True)]
        mean, std = total / number, np.where(np.sqrt(variance) > 0, np.sqrt(variance), 255.0)
    elif normalize == "imagenet":
        mean, std = (255 * np.array(values) for values in IMAGENET)
    else:
        mean, std = np.zeros(3), np.full(3, 255.0)
    scale = {name: v.reshape(3, 1, 1).astype(np.float32) for name, v in (("mean", mean), ("std", std))}
    scale_values = {name: values.ravel().tolist() for name, values in scale.items()}
    colours = [(name, "of 255", 0.0, 255.0) for name in ("red", "green", "blue")]
    measurement = Measurement.from_sensors(
        colours, pixels.shape[1:], AXES, mean=scale_values["mean"], std=scale_values["std"]
    )
    return ArrayDataset(pixels, y.astype(np.int64), None, tuple(classes), test, group, **scale, measurement=measurement)
