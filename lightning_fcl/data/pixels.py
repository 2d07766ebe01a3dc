"""Images that are stored as uint8 and normalised when they are taken, and samples as data sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import IntArray


class PixelRows(Dataset[tuple[Tensor, Tensor]]):
    """Some samples of stored pixels as a data set, normalised when they are read."""

    def __init__(self, samples: Samples, indices: IntArray) -> None:
        self.samples = samples
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        x, y = self.samples.take(self.indices[rows])
        return list(zip(x, y, strict=True))


def rows_of(samples: Samples, indices: IntArray) -> Dataset[Any]:
    if isinstance(samples.x, Dataset):
        return Subset(samples.x, indices.tolist())
    return TensorDataset(*samples.take(indices)) if samples.scale is None else PixelRows(samples, indices)


def normalised(samples: Samples, mean: Any, std: Any) -> Samples:
    """Samples of uint8 images that are normalised when they are taken."""
    x = samples.x
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() < 2:
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"Expected `x` to be uint8 images of shape (n, channels, height, width) for `mean` and `std` but got "
            f"{what}. Normalise other samples beforehand, or in your data set's transform."
        )
    scale = []
    for name, given, least in (("mean", mean, "at least 0"), ("std", std, "above 0")):
        values = np.asarray(np.nan if given is None else given, dtype=np.float32)
        if not ((values >= 0) & (values <= 1) & ((values > 0) | (name == "mean"))).all():
            raise ValueError(
                f"Expected `{name}` to be {least} and at most 1, of pixels scaled to [0, 1], but got {given}. Pass "
                "`mean` and `std`, in units of 255 grey levels."
            )
        if values.ndim > 1 or values.size not in (1, x.shape[1]):
            last = x.dim() == 4 and values.size == x.shape[-1]
            raise ValueError(
                f"Expected `{name}` to be a number, or one for each of {x.shape[1]} channels of images of shape "
                f"{tuple(x.shape[1:])}, but got {values.size}."
                + (" The channels come last: pass `x.transpose(0, 3, 1, 2)`." if last else "")
            )
        scale.append(torch.from_numpy(255 * values.reshape(-1, *[1] * (x.dim() - 2))))
    return replace(samples, scale=(scale[0], scale[1]))
