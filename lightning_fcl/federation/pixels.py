"""Remembered images as the pixels that they were made of: a quarter of the room."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MARK = "|uint8"


@dataclass(frozen=True)
class Pixels:
    """Turns images, normalised by a mean and deviation, into their stored pixels and back, to the very same numbers.

    What is of another shape, or was not made of whole pixels, stays as it is.
    """

    mean: Tensor
    std: Tensor
    shape: tuple[int, ...]

    def pack(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        packed = {}
        for name, value in memory.items():
            stored = self._stored(value)
            packed[name if stored is None else name + _MARK] = value if stored is None else stored
        return packed

    def unpack(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.removesuffix(_MARK): self._normalised(value) if name.endswith(_MARK) else value
            for name, value in memory.items()
        }

    def _normalised(self, stored: Tensor) -> Tensor:
        return (stored - self.mean.to(stored.device)) / self.std.to(stored.device)

    def _stored(self, value: Tensor) -> Tensor | None:
        """The pixels of images; None if a value is something else."""
        if value.dtype != self.mean.dtype or not len(self.shape) or tuple(value.shape[1:]) != self.shape:
            return None
        if not value.dim() or not len(value):
            return None
        levels = (value * self.std.to(value.device) + self.mean.to(value.device)).round().clamp(0, 255)
        stored = levels.nan_to_num().to(torch.uint8)
        return stored if torch.equal(self._normalised(stored), value) else None
