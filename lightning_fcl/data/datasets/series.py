"""Time series to samples: chunks inside stretches of one label, and z-scores per owner, with or without the future."""

import itertools
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Normalize", "cut", "normalized", "require_chunk", "require_normalize", "stretches"]

Normalize = Literal["user", "causal", "none"]


def stretches(labels: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return where uninterrupted stretches of one label start and stop.

    Args:
        labels: Labels in time order, shape ``(t,)``; below 0 means none.

    Returns:
        First index and the one past the last of every stretch that has a label, in time order.

    Example:
        >>> stretches(np.array([0, 0, -1, 0, 2, 2]))
        [(0, 2), (3, 4), (4, 6)]
    """
    bounds = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start and labels[start] >= 0]


def cut(x: NDArray[np.float32], labels: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cut a series into chunks that do not overlap, each inside one stretch of a label; incomplete rests are dropped.

    Args:
        x: Series, shape ``(t, features)``.
        labels: Labels, shape ``(t,)``; below 0 means none.
        chunk: Time steps per chunk.

    Returns:
        Chunks in time order, shape ``(n, chunk, features)``, and their labels, shape ``(n,)``.

    Example:
        >>> series = np.arange(7, dtype=np.float32)[:, np.newaxis]
        >>> chunks, y = cut(series, np.array([0, 0, 0, 1, 1, -1, 1]), chunk=2)
        >>> chunks[:, :, 0].tolist(), y.tolist()
        ([[0.0, 1.0], [3.0, 4.0]], [0, 1])
    """
    kept = [(start, (stop - start) // chunk, labels[start]) for start, stop in stretches(labels)]
    pieces = [x[start : start + n * chunk].reshape(n, chunk, x.shape[1]) for start, n, _ in kept if n]
    y = np.repeat([label for _, _, label in kept], [n for _, n, _ in kept]).astype(np.int64)
    return np.concatenate([np.empty((0, chunk, x.shape[1]), np.float32), *pieces]), y


def normalized(x: NDArray[np.float32], how: Normalize) -> NDArray[np.float32]:
    """Scale the chunks of one owner, feature by feature.

    Args:
        x: Chunks in time order, shape ``(n, chunk, features)``.
        how: ``"user"`` is the z-score over all chunks, so every value depends on the future too. ``"causal"`` scales a
            chunk with mean and standard deviation of the chunks before it; the first chunk has no past and is scaled
            with its own. ``"none"`` leaves the units. A feature that does not vary (in ``"causal"``: that has not
            varied so far) is only centred.

    Returns:
        Scaled chunks, same shape.

    Example:
        >>> x = np.array([[[0.0], [2.0]], [[4.0], [4.0]]], dtype=np.float32)
        >>> normalized(x, "causal")[:, :, 0].tolist()
        [[-1.0, 1.0], [3.0, 3.0]]
    """
    if how == "none" or len(x) == 0:
        return x
    if how == "user":
        mean = x.mean(axis=(0, 1), dtype=np.float64)
        std = x.std(axis=(0, 1), dtype=np.float64)
        low, high = x.min(axis=(0, 1)), x.max(axis=(0, 1))
    else:
        mean, std, low, high = (values[:, np.newaxis] for values in _past(x))
    # Rounding leaves a constant feature a tiny deviation, and dividing by that would blow the rounding up to ones.
    return cast(NDArray[np.float32], ((x - mean) / np.where(low == high, 1.0, std)).astype(np.float32))


def _past(x: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """Mean, standard deviation, minimum and maximum of the chunks before each chunk, shape ``(n, features)`` each."""
    steps = x.shape[1] * np.maximum(np.arange(len(x)), 1)[:, np.newaxis]
    # Around the owner's first value: sums of squares around zero lose the variance of a feature with a large mean.
    shifted = x.astype(np.float64) - x[0, 0].astype(np.float64)
    mean = _before(np.cumsum(shifted.sum(axis=1), axis=0)) / steps
    variance = _before(np.cumsum(np.square(shifted).sum(axis=1), axis=0)) / steps - np.square(mean)
    low = _before(np.minimum.accumulate(x.min(axis=1), axis=0))
    high = _before(np.maximum.accumulate(x.max(axis=1), axis=0))
    # What rounding leaves of a variance may be zero or negative though the feature varies; its range bounds it below.
    floor = (high.astype(np.float64) - low) / np.sqrt(2.0 * steps)
    return mean + x[0, 0], np.maximum(np.sqrt(np.maximum(variance, 0)), floor), low, high


def _before(totals: NDArray[Any]) -> NDArray[Any]:
    """Shift running totals by one chunk; the first chunk keeps its own."""
    return np.concatenate([totals[:1], totals[:-1]])


def require_chunk(chunk: int) -> None:
    """Refuse a chunk that is no whole number of at least 1.

    Args:
        chunk: Time steps per chunk.

    Raises:
        ValueError: If it is not.

    Example:
        >>> require_chunk(0)
        Traceback (most recent call last):
        ValueError: Expected `chunk` to be a whole number of time steps, at least 1, but got 0. Pass, for example, 32.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int | np.integer) or chunk < 1:
        raise ValueError(
            f"Expected `chunk` to be a whole number of time steps, at least 1, but got {chunk!r}. "
            "Pass, for example, 32."
        )


def require_normalize(how: str) -> None:
    """Refuse an unknown way of scaling.

    Args:
        how: What `normalized` would be called with.

    Raises:
        ValueError: If it is not known.

    Example:
        >>> require_normalize("user")
    """
    if how not in ("user", "causal", "none"):
        raise ValueError(f"Expected `normalize` to be 'user', 'causal' or 'none' but got {how!r}. Choose one of these.")
