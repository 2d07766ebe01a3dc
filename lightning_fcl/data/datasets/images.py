"""Functions that read, check and resize images, and return datasets of photographs or of gray faces."""

import hashlib
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# Mean and standard deviation of red, green and blue on ImageNet. These constants are also in torchvision and timm.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# For each target mode: the Pillow modes that are accepted, with 8 bits per channel. Some photographs of ImageNet are
# CMYK.
_MODES = {"L": ("L", "RGB"), "RGB": ("L", "RGB", "CMYK")}
# Formats that users' own photographs can have. For some other formats, such as EPS, Pillow would start another program.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def check_faces(size: Sequence[int]) -> None:
    # `isinstance(True, int)` is true, so the exact type is compared.
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise InvalidValueError(
            f"Expected `size` to be two positive integers, height and width, but got {size!r}.",
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
    """Return an image with 8 bits per channel: shape (height, width, 3) for "RGB" or (height, width) for "L".

    The checksums of a PNG file are verified, unless ``content`` is given.

    Args:
        path: Path of the image file.
        file_format: Required format, by its name in Pillow. None accepts all common formats and bit depths.
        mode: ``"RGB"`` converts gray to three equal channels. ``"L"`` converts colors to gray by ITU-R 601-2 luma.
        shape: Required height and width, which are checked before the pixels are decoded.
        content: Bytes of the image if the image is part of another file. ``path`` is then only used in messages.

    Raises:
        MissingFileError: If the file is missing.
        DamagedFileError: If the file is damaged, or has a different format or shape.
    """
    require_package("PIL.Image", "reads images")
    from PIL import Image, PngImagePlugin

    formats = [file_format] if file_format else list(_FORMATS)
    description = f"to be a complete {' or '.join(formats)} image" + (f" of {shape[0]} x {shape[1]}" if shape else "")
    with (
        as_file_error(path, description),
        open_file(path) if content is None else io.BytesIO(content) as file,
        Image.open(file, formats=formats) as image,
    ):
        packed = os.fstat(file.fileno()).st_size if content is None else len(content)
        check_size(4 * image.height * image.width, packed)
        fits = shape in (None, (image.height, image.width)) and (file_format is None or image.mode in _MODES[mode])
        check(fits, f"an image of {image.height} x {image.width} in Pillow's mode {image.mode!r}")
        if image.format == "PNG" and content is None:
            with open_file(path) as chunks:
                # Skip the PNG signature. `image.load` verifies the checksums of only some chunks.
                chunks.seek(8)
                PngImagePlugin.ChunkStream(chunks).verify()
        return np.asarray(image.convert(mode))


def packed_images(
    path: Path, arrays: Mapping[str, NDArray[Any]], name: str, names: Sequence[str], remedy: str
) -> Iterator[NDArray[np.uint8]]:
    """Return the images (height, width, 3) of an array with the concatenated bytes of image files.

    Args:
        path: Path of the npz file, for messages.
        arrays: Arrays of the file: the bytes, and ``offsets``, the position of each image's first byte and the end.
        name: Name of the array with the bytes. In upper case, the name is the images' format in Pillow.
        names: Names of the images, for messages.
        remedy: Hint for errors.

    Raises:
        InvalidValueError: If the offsets do not divide the bytes into one image per name.
        DamagedFileError: If an image is damaged. Images are decoded when the iterator returns them.
    """
    content, offsets = arrays[name], arrays["offsets"].astype(np.int64)
    bounds = [0, *offsets[1:-1].tolist(), len(content)]
    if offsets.tolist() != bounds or len(bounds) != len(names) + 1 or (np.diff(offsets) < 0).any():
        limits = f" from {offsets[0]} to {offsets[-1]}" if len(offsets) else ""
        raise InvalidValueError(
            f"Expected `offsets` of {path} to cut the {len(content)} bytes of `{name}` into {len(names)} images, but "
            f"got {len(offsets)} bounds{limits}. {remedy}",
            argument="offsets",
        )
    return (
        read_image(path / own_name, name.upper(), "RGB", content=content[first:last].tobytes())
        for own_name, (first, last) in zip(names, itertools.pairwise(offsets), strict=True)
    )


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
    """Return a dataset of gray images of shape (height, width). Resize the images unless ``size`` is None.

    ``normalize="image"`` scales each image to mean 0 and variance 1. A constant image becomes 0. ``normalize="none"``
    scales pixels from 0..255 to 0..1.
    """
    x = []
    for image in images:
        pixels = _resized(image, size)
        if normalize == "none":
            x.append((pixels / 255).astype(np.float32))
            continue
        # The mean of equal integers up to 255 is exact in double precision, so a constant image becomes exactly 0.
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
    """Resize images of shape (height, width, 3) with Pillow's antialiased bicubic filter, and stack them as NCHW."""
    pixels = np.empty((number, 3, size, size), np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[...] = _resized(image, (size, size)).transpose(2, 0, 1)
    return pixels


def resize_all_once(
    files: Sequence[Path], images: Iterable[NDArray[np.uint8]], names: Sequence[str], size: int
) -> NDArray[np.uint8]:
    """Return the result of `resize_all` for images in files. The result is cached on disk until a file changes.

    Args:
        files: Files that contain the images. The cache key contains the path, size and modification time of each file.
        images: Images of shape (height, width, 3).
        names: One name per image. The cache key contains the names, so that different images from the same files have
            different cache files.
        size: Height and width in pixels.
    """
    digest = hashlib.sha256("\n".join(names).encode())
    for path in files:
        with as_file_error(path, "to be an image file"):
            file_stat = path.stat()
        digest.update(f"\n{path.absolute()} {file_stat.st_size} {file_stat.st_mtime_ns}".encode())
    cache_path, shape = cache_folder() / "images" / f"{digest.hexdigest()[:32]}-{size}", (len(names), 3, size, size)
    if cache_path.is_file() and cache_path.stat().st_size == math.prod(shape):
        # The file is mapped, so that images are read only if they are used. Changes of the array do not reach the file.
        return np.memmap(regular_file(cache_path), np.uint8, "c", shape=shape)
    pixels = resize_all(images, len(names), size)
    # If the cache cannot be written, the next call resizes the images again.
    with suppress(OSError):
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
    """Return photographs of shape (n, 3, height, width) as a dataset of pixels, with mean and deviation per channel.

    Args:
        pixels: Photographs, uint8.
        y: Labels, shape (n,).
        classes: Names of the classes, in the order of the labels.
        normalize: ``"imagenet"`` scales pixels to 0..1, subtracts the mean of ImageNet's channels, and divides by the
            standard deviation of ImageNet's channels. ``"channel"`` uses the mean and deviation of these images without
            the test set, or of all images if all of them are in the test set. A channel that is constant in these
            images is centered and divided by 255. ``"none"`` only scales to 0..1.
        test: Whether each photograph belongs to the official test set, shape (n,). None if there is no test set.
        group: Natural domain of each photograph, shape (n,). None if there are no domains.
    """
    if normalize == "channel":
        train_pixels = pixels if test is None or test.all() else pixels[~test]
        number, total = train_pixels.size // 3, train_pixels.sum(axis=(0, 2, 3), dtype=np.int64)
        squares = np.einsum("nchw,nchw->c", train_pixels, train_pixels, dtype=np.int64)
        # n^2 var = n sum(x^2) - (sum x)^2. Python integers do not overflow, so this is exact.
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
