"""A whole data set in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.datasets.measurement import Measurement

_PIECE = 4096  # samples that are looked at together


@dataclass(frozen=True, eq=False)
class Arrays:
    """A whole data set in memory, with the owner of each sample where the data have one.

    Images may stay as they are stored, a byte a pixel, with the `mean` and `std` that make them samples: `samples`
    normalises those that are asked for.

    Args:
        x: Samples, shape ``(n, ...)``, float32, finite; or pixels, uint8, if there are `mean` and `std`.
        y: Labels, shape ``(n,)``, int64, from 0 to C - 1.
        client: Natural owner of each sample (a subject's number or name), shape ``(n,)``, or None.
        classes: The C names of the classes, in the order of the labels.
        official_test: True where the publishers put the sample in their test set, shape ``(n,)``, or None.
        group: Natural domain of each sample (a device, a place), shape ``(n,)``, or None.
        mean: What is subtracted from pixels, in grey levels from 0 to 255, of a shape that broadcasts to one sample,
            such as ``(channels, 1, 1)``; float32.
        std: What the rest is divided by, of the same shape; float32, above 0.
        measurement: What a device measured, and how `x` was made of that, or None.

    Raises:
        ValueError: If shapes, types or labels do not fit together, or if `x` holds values that are not finite.

    Example:
        >>> scale = {"mean": np.zeros((1, 1, 1), np.float32), "std": np.full((1, 1, 1), 255, np.float32)}
        >>> pixels = np.full((2, 3, 8, 8), 51, np.uint8)
        >>> data = Arrays(x=pixels, y=np.array([0, 1]), client=None, classes=("cat", "dog"), **scale)
        >>> data.x.dtype.name, data.samples([1]).dtype.name, data.samples([1]).max().item()
        ('uint8', 'float32', 0.20000000298023224)
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    client: NDArray[Any] | None
    classes: tuple[str, ...]
    official_test: NDArray[np.bool_] | None = None
    group: NDArray[Any] | None = None
    mean: NDArray[np.float32] | None = None
    std: NDArray[np.float32] | None = None
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
        pixels, size = self.mean is not None or self.std is not None, len(self.x) if np.ndim(self.x) else 0
        if not size:
            raise ValueError(
                f"Expected `x` to hold at least one sample but got shape {self.x.shape}. Check that the files are not "
                "empty."
            )
        kinds = {"x": "uint8" if pixels else "float32", "y": "int64", "official_test": "bool"}
        kinds |= {"mean": "float32", "std": "float32", "client": "integers or text", "group": "integers or text"}
        for name, kind in kinds.items():
            column = vars(self)[name]
            if column is None:
                continue
            fits = column.dtype.kind in "iuU" if kind == "integers or text" else column.dtype == kind
            each = "" if name in ("x", "mean", "std") else f", one entry for each of {size} samples,"
            if not fits or (each and column.shape != (size,)):
                raise ValueError(
                    f"Expected `{name}` to hold {kind}{each} but got {column.dtype} of shape {column.shape}. Convert "
                    "it, or read it from the same files as `x`."
                )
        wrong = np.flatnonzero((self.y < 0) | (self.y >= len(self.classes)))
        if wrong.size:
            raise ValueError(
                f"Expected `y` to be between 0 and {len(self.classes) - 1}, a label for each of the "
                f"{len(self.classes)} `classes`, but got {self.y[wrong[0]]} in sample {wrong[0]} (and {wrong.size} "
                "such labels in all). Number the labels from 0, or name every class."
            )
        if pixels:
            _require_scale(self.mean, self.std, self.x.shape[1:])
        # Piece by piece: one truth value for each number of a large data set is a fourth of its memory.
        elif not all(np.isfinite(self.x[n : n + _PIECE]).all() for n in range(0, len(self.x), _PIECE)):
            per_sample = (~np.isfinite(self.x)).reshape(size, -1).sum(axis=1)
            bad = np.flatnonzero(per_sample)
            raise ValueError(
                f"Expected `x` to be finite but got {per_sample[bad[0]]} NaN or infinite values of {self.x[0].size} in "
                f"sample {bad[0]} ({bad.size} of {size} samples have such values). Mend or drop these samples first."
            )

    def samples(self, indices: Any = slice(None)) -> NDArray[np.float32]:
        """Samples as models take them, float32: pixels normalised, all others as they are."""
        chosen: NDArray[Any] = self.x[indices]
        return chosen if self.mean is None or self.std is None else (chosen - self.mean) / self.std


def _require_scale(mean: NDArray[Any] | None, std: NDArray[Any] | None, shape: tuple[int, ...]) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            raise ValueError(f"Expected `mean` and `std` but got no `{name}`. Pass both, or neither.")
        broadcasts = values.ndim == len(shape) and all(n in (1, m) for n, m in zip(values.shape, shape, strict=True))
        if not broadcasts or not np.isfinite(values).all() or (name == "std" and values.min() <= 0):
            raise ValueError(
                f"Expected `{name}` to be finite{', above 0' if name == 'std' else ''} and of a shape that broadcasts "
                f"to a sample, {shape}, but got {values.ravel().tolist()} of shape {values.shape}. For a value of each "
                f"channel of images pass shape ({shape[0] if shape else 1}, 1, 1)."
            )
