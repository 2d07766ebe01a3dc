"""Replacement of images by the features of a frozen backbone. A file in the user's cache stores the features."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm import tqdm

from lightning_fcl.data.batching import BatchRequest, LoaderConfig, read_batches
from lightning_fcl.data.image_keys import read_key, write_key
from lightning_fcl.data.samples import Samples
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.atomic import atomic_path, disk_error_context, file_lock
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import regular_file
from lightning_fcl.models.backbone import frozen_backbone

BATCH_SIZE = 16
"""Number of images per batch. Layer outputs then fit into a CPU's cache. With 64, all images take twice the time."""

# Size in bytes of the SHA-256 checksum after the features.
_DIGEST = 32


def compute_features(
    samples: Samples,
    backbone: nn.Module | str,
    num_workers: int = 0,
    device: torch.device | None = None,
    image_key_file: Path | None = None,
) -> Samples:
    """Return samples whose inputs are a backbone's features of the images, shape (n, features).

    Targets, owners and splits stay unchanged. The name of the cache file depends on the images, on their order, and on
    the layers and weights of the backbone. Every split, process and run with the same images maps the same file into
    memory. Before each use, the checksum and the first features of the file are checked.

    With ``image_key_file``, the checksum of the images is cached until a source file changes. Later runs then read only
    the first images.

    Args:
        samples: Samples with images.
        backbone: A name of `frozen_backbone`, or a module with a method ``embed(x)``.
        num_workers: Number of processes that read images.
        device: Device of the backbone. None leaves the backbone on its current device.
        image_key_file: File that contains the checksum of the images, from `key_file`. If the file is missing, it is
            written. None if the images do not come from a public dataset.
    """
    network, folder = _backbone(backbone).to(device), cache_folder() / "features"
    model_key, digest, first = _fingerprint(network).hexdigest()[:16], hashlib.sha256(), list[Tensor]()
    cached_key = "" if image_key_file is None else read_key(image_key_file)

    def read_images() -> Iterator[Tensor]:
        for batch in iter_images(samples, num_workers):
            first[:] = first or [batch]
            digest.update(f"{batch.dtype} {tuple(batch.shape)}".encode())
            digest.update(_bytes(batch))
            yield batch

    with disk_error_context(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        with file_lock(folder / f".{model_key}.lock"):
            # If this backbone has no cached features, one pass over the images computes the key and the features.
            if not any(folder.glob(f"{model_key}-*")):
                _write(folder / model_key, len(samples), (_features(network, x, device) for x in read_images()))
                (folder / model_key).rename(folder / f"{model_key}-{digest.hexdigest()[:32]}")
        if cached_key and not first:
            image_key, first = cached_key, [next(iter_images(samples, num_workers))]
        else:
            if not first:
                deque(read_images(), maxlen=0)
            image_key = digest.hexdigest()
        if image_key_file is not None and image_key != cached_key:
            write_key(image_key_file, image_key)
        path, begin = folder / f"{model_key}-{image_key[:32]}", _features(network, first[0], device)
        shape = (len(samples), begin.shape[1])
        with file_lock(path.with_name(f".{path.name}.lock")):
            if not _is_whole(path, shape, begin):
                _write(path, len(samples), (_features(network, x, device) for x in iter_images(samples, num_workers)))
            x = torch.from_file(str(regular_file(path)), size=shape[0] * shape[1]).view(shape)
    loaders = {
        part: replace(loading, collate_fn=default_collate, num_workers=0, worker_init_fn=None)
        for part, loading in samples.loader_configs.items()
    }
    return replace(samples, x=x, scale=None, measurement=None, collate_fn=default_collate, loader_configs=loaders)


class BackboneAndModule(nn.Module):
    """A backbone followed by a module that was trained on the backbone's features. Inputs are images in [0, 1].

    Example:
        >>> from lightning_fcl.models import MLP
        >>> BackboneAndModule(MLP([12, 7, 5]), MLP([7, 2]))(torch.zeros(4, 3, 2, 2)).shape
        torch.Size([4, 2])
    """

    def __init__(self, backbone: nn.Module | str, module: nn.Module) -> None:
        super().__init__()
        self.backbone, self.module = _backbone(backbone), module

    def forward(self, x: Tensor) -> object:
        return self.module(self.backbone.embed(x))


def iter_images(samples: Samples, num_workers: int = 0) -> Iterator[Tensor]:
    """Yield batches of the stored images. If the dataset draws random numbers, each call draws the same numbers."""
    parts = np.split(np.arange(len(samples)), range(BATCH_SIZE, len(samples), BATCH_SIZE))
    requests = (BatchRequest(part, 0, ("features", number)) for number, part in enumerate(parts))
    reading = read_batches(samples.get_stored, requests, LoaderConfig(BATCH_SIZE, num_workers=num_workers))
    for batch in reading if samples.is_random else map(samples.get_stored, parts):
        if not (samples.classes and isinstance(batch, list) and len(batch) == 2 and isinstance(batch[0], Tensor)):
            raise InvalidValueError(
                "Expected pairs of an image and a class label for `backbone`, but got other items or targets.",
                hint="Return pairs of a tensor and a label from the dataset.",
                argument="backbone",
            )
        yield batch[0]


def to_pixels(samples: Samples) -> Samples:
    """Return samples whose images have the form that a backbone expects: scaled to [0, 1] and not normalized.

    Samples that are not uint8 tensors are returned unchanged.
    """
    if not isinstance(samples.x, Tensor) or samples.x.dtype != torch.uint8:
        return samples
    measurement, channels = samples.measurement, samples.x.shape[1]
    if measurement is not None:
        measurement = replace(measurement, mean=(0.0,) * channels, std=(255.0,) * channels)
    return replace(samples, scale=(torch.tensor(0.0), torch.tensor(255.0)), measurement=measurement)


def clear_features() -> tuple[int, int]:
    """Delete all features in the user's cache. Return the number of deleted files and their total size in bytes."""
    files = [path for path in (cache_folder() / "features").glob("[!.]*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    for path in files:
        path.unlink()
    return len(files), sum(sizes)


def _backbone(backbone: nn.Module | str) -> Any:
    network = frozen_backbone(backbone) if isinstance(backbone, str) else backbone
    if not callable(getattr(network, "embed", None)):
        raise InvalidValueError(
            "Expected `backbone` to be a name of `frozen_backbone`, or a module with `embed(x)`, but got a "
            f"`{type(network).__name__}`.",
            hint="Define `embed(x)`, which returns the features of images, shape (batch, features).",
            argument="backbone",
        )
    return network.eval()


def _features(network: Any, x: Tensor, device: torch.device | None) -> Tensor:
    # Pixels are scaled to [0, 1] but not normalized, because the backbone normalizes its inputs.
    pixels = x / 255 if x.dtype == torch.uint8 else x
    features: Tensor = network.embed(pixels.to(device))
    return features.float().cpu()


def _write(path: Path, samples: int, features: Iterator[Tensor]) -> None:
    digest = hashlib.sha256()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        with tqdm(total=samples, unit="image", desc="features", disable=None) as bar:
            for batch in features:
                digest.update(content := _bytes(batch))
                file.write(content)
                bar.update(len(batch))
        file.write(digest.digest())


def _is_whole(path: Path, shape: tuple[int, int], begin: Tensor) -> bool:
    """Return whether the file is undamaged and its first features are nearly equal to new outputs of the backbone."""
    if not path.is_file() or path.stat().st_size != 4 * shape[0] * shape[1] + _DIGEST:
        return False
    content = np.memmap(regular_file(path), np.uint8, "r").data
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:].tobytes():
        return False
    cached_features = torch.from_file(str(regular_file(path)), size=begin.numel()).view_as(begin)
    return torch.allclose(cached_features, begin, rtol=1e-2, atol=1e-3 * float(begin.abs().max()))


def _fingerprint(network: nn.Module) -> Any:
    """Return a SHA-256 hash object of a backbone's class name, layers and state tensors."""
    digest = hashlib.sha256(f"{type(network).__qualname__} {network}".encode())
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    return digest


def _bytes(values: Tensor) -> Any:
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
