"""Products of a few long vectors with each other, in double precision whatever their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Matrix = np.ndarray[Any, np.dtype[np.float64]]

_BLOCK = 2048  # coordinates of a dot product: the few rows it meets next stay in the cache of a processor core
_CONVERTED = 2**19  # numbers converted at once, 4 MiB: long stretches of each row, and still in a cache
_PIECE = 2**21  # coordinates at once on other devices


@torch.no_grad()
def gram(rows: Tensor, last: Tensor) -> Matrix:
    """Products of the vectors ``rows``, shape (k, p), and ``last`` with each other: shape (k + 1, k + 1), float64.

    On a CPU, dot products of pieces that were just converted: half of them suffice, as the matrix is symmetric, and
    with so few vectors a matrix product spends most of its time on rearranging them.
    """
    return _by_dots(rows, last) if device_of(last).type == "cpu" else _by_matrix_products(rows, last)


def device_of(tensor: Tensor) -> torch.device:
    """Where there is double precision for a tensor: Apple's GPUs have none."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device


def _by_dots(rows: Tensor, last: Tensor) -> Matrix:
    """Each vector times itself and the following ones, in a ring: every pair once (twice, if their number is even)."""
    count, length = len(rows) + 1, len(last)
    offsets = count // 2 + 1
    total = count + offsets - 1
    block = max(1, min(_BLOCK, length))
    blocks = max(1, min(_CONVERTED // total, length) // block)
    wide = torch.empty(total, blocks, block, dtype=torch.float64)
    flat = wide.view(total, -1)
    ring = wide.unfold(0, offsets, 1).permute(1, 0, 3, 2).numpy()  # (blocks, count, offsets, block)
    each = wide[:count, :, None].transpose(0, 1).numpy()
    sums, products = np.zeros((blocks, count, offsets)), np.empty((blocks, count, offsets))
    for start in range(0, length, flat.shape[1]):
        size = min(flat.shape[1], length - start)
        piece = rows[:, start : start + size]
        flat[: count - 1, :size].copy_(piece)
        flat[count - 1, :size].copy_(last[start : start + size])
        flat[count:, :size].copy_(piece[: offsets - 1])
        flat[:, size:] = 0
        with np.errstate(all="ignore"):
            sums += np.vecdot(ring, each, out=products, order="C")  # block by block, not row by row
    first = np.arange(count)[:, None]
    second = (first + np.arange(offsets)) % count
    result = np.empty((count, count))
    result[first, second] = result[second, first] = sums.sum(axis=0)
    return result


def _by_matrix_products(rows: Tensor, last: Tensor) -> Matrix:
    k, length = rows.shape
    padded = -(-(k + 1) // 4) * 4  # fastest in whole registers: the last rows stay zero
    products = torch.zeros(padded, padded, dtype=torch.float64, device=device_of(last))
    wide = torch.zeros(padded, min(_PIECE, length), dtype=torch.float64, device=products.device)
    for start in range(0, length, _PIECE):
        size = min(_PIECE, length - start)
        part = wide[:, :size]
        part[:k].copy_(rows[:, start : start + size])
        part[k].copy_(last[start : start + size])
        products.addmm_(part, part.T)
    result: Matrix = products[: k + 1, : k + 1].cpu().numpy()
    return result
