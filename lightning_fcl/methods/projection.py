"""Projection of gradients: a step for one task that, to first order, raises no other task's loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State

DistanceKind = Literal["wasserstein", "cosine"]
Matrix = np.ndarray[Any, np.dtype[np.float64]]
Solver = Callable[[Matrix, Matrix], Matrix]

_TOLERANCE = 4e-9  # of cosines: with what rounding adds, 1e-8 holds
_PIECE = 16384  # coordinates: a dozen gradients of them stay in the cache of a processor core
_STRETCH = 2**18  # coordinates: a stretch of the result stays in a cache while others are added to it
_LONG = 100_000  # coordinates
_FIRST = 0 if find_spec("quadprog") else 1  # of the two solvers

_BLOCK = 2048  # coordinates of a dot product: the few rows it meets next stay in the cache of a processor core
_CONVERTED = 2**19  # numbers converted at once, 4 MiB: long stretches of each row, and still in a cache
_MATRIX_PIECE = 2**21  # coordinates at once on other devices


@torch.no_grad()
def project(gradient: Tensor, constraints: Tensor, margin: float = 0.0) -> Tensor:
    """The gradient nearest to ``gradient``, shape (p,), that points away from no constraint gradient, shape (k, p).

    It solves ``min_g' 1/2 ||g' - g||^2`` such that ``<g', g_i> >= 0`` for all rows ``g_i`` of G, through its dual with
    as many variables as constraints, ``min_v 1/2 v^T G G^T v + g^T G^T v`` such that ``v >= margin``, and
    ``g' = G^T v + g`` (Lopez-Paz and Ranzato 2017, GEM, eq. 11 and 12; FedViT, eq. 7 to 9). Where no constraint is
    violated it is ``gradient`` itself, whatever the margin, as in GEM's own code.

    Products are taken in double precision and of unit vectors, so that scales do not matter: ``<g', g_i> / (||g||
    ||g_i||)`` is at least -1e-8. Rows may be zero, alike, or dependent. Without a margin the result is never longer
    than ``gradient``.
    """
    products = _gram(gradient, constraints)
    weights = _weights(products, margin)
    if weights is None:
        return gradient
    if not np.isfinite(weights).all():
        return torch.zeros_like(gradient)  # no step at all violates nothing
    return _combine(gradient, constraints, weights, products)


@torch.no_grad()
def agem(gradient: Tensor, reference: Tensor) -> Tensor:
    """The gradient nearest to ``gradient`` that does not point away from one reference gradient.

    ``g - (g^T g_ref / g_ref^T g_ref) g_ref`` where ``g^T g_ref < 0`` (Chaudhry et al. 2019, A-GEM, eq. 11).
    """
    products = _gram(gradient, reference[None])
    if products[0, 1] >= 0:
        return gradient
    return _combine(gradient, reference[None], -products[:1, 1] / products[0, 0], products)


@torch.no_grad()
def gradient_distance(gradient: Tensor, references: Tensor, kind: DistanceKind = "wasserstein") -> Tensor:
    """How far other gradients, shape (k, p), are from a gradient: shape (k,), in double precision, on the CPU.

    ``"wasserstein"``: between the distributions of their coordinates, ``mean |sort(a) - sort(b)|``, which does not see
    in which coordinate a value stands. ``"cosine"``: 1 - the cosine of the angle between them, 1 for a zero gradient.
    """
    if kind == "wasserstein":
        ordered = _sorted(gradient)
        values = [float((_sorted(other) - ordered).abs().mean(dtype=torch.float64)) for other in references]
    else:
        wide = _wide(gradient)
        length = float(wide.norm())
        products = [(float(row @ wide), float(row.norm()) * length) for row in map(_wide, references)]
        values = [1.0 - product / scale if scale else 1.0 + 0 * product for product, scale in products]
    if not np.isfinite(values).all():
        _refuse(bool(torch.isfinite(gradient).all()), [bool(torch.isfinite(other).all()) for other in references])
    return torch.tensor(values, dtype=torch.float64)


def most_dissimilar(gradient: Tensor, references: Tensor, k: int, kind: DistanceKind = "wasserstein") -> Tensor:
    """Which ``k`` gradients are farthest from a gradient, those first (FedViT's signature tasks, section 3.3)."""
    return gradient_distance(gradient, references, kind).argsort(descending=True, stable=True)[:k]


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """One vector of named tensors, in their order."""
    return torch.cat([value.reshape(-1) for value in tensors.values()])


def unflatten(flat: Tensor, reference: Mapping[str, Tensor]) -> State:
    """The named tensors of a vector that `flatten` made, in the shapes of ``reference``."""
    pieces = torch.split(flat, [value.numel() for value in reference.values()])
    return {name: piece.view(value.shape) for (name, value), piece in zip(reference.items(), pieces, strict=True)}


def _gram(gradient: Tensor, constraints: Tensor) -> Matrix:
    result = gram_matrix(constraints, gradient)
    finite = np.isfinite(result.diagonal())
    if not finite.all():
        _refuse(bool(finite[-1]), finite[:-1].tolist())
    return result


def _combine(gradient: Tensor, constraints: Tensor, weights: Matrix, products: Matrix) -> Tensor:
    lengths = np.sqrt(products.diagonal())
    cancelling = weights @ lengths[:-1] > 10 * lengths[-1]
    whole = gradient.dtype == constraints.dtype and gradient.dtype in (torch.float32, torch.float64)
    if len(gradient) >= _LONG and whole and not cancelling:
        # Rounding errors of so many coordinates average out, unless large terms cancel each other.
        active = np.flatnonzero(weights * lengths[:-1] > 1e-15 * lengths[-1])
        if constraints.stride(1) != 1 or 3 * len(active) > 2 * len(weights):
            return torch.addmv(gradient, constraints.T, torch.from_numpy(weights).to(gradient))
        result = gradient.clone(memory_format=torch.contiguous_format)
        for start in range(0, len(gradient), _STRETCH):  # the others are not read
            result_slice, stretch = result[start : start + _STRETCH], constraints[:, start : start + _STRETCH]
            for i in active:
                result_slice.add_(stretch[i], alpha=float(weights[i]))
        return result
    device = solver_device(gradient)
    row_indices = torch.from_numpy(np.flatnonzero(weights))
    wide = torch.from_numpy(weights)[row_indices].to(device)
    row_indices = row_indices.to(constraints.device)
    result = torch.empty_like(gradient)
    size = _PIECE if device.type == "cpu" else 128 * _PIECE
    for start in range(0, len(gradient), size):
        piece = slice(start, start + size)
        rows = constraints[:, piece].index_select(0, row_indices)
        total = torch.addmv(_wide(gradient[piece]), _wide(rows).T, wide)
        result[piece].copy_(total)
    return result


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(solver_device(tensor), torch.float64)


def _sorted(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    # NumPy sorts many times faster than torch on a CPU.
    return torch.from_numpy(np.sort(tensor.numpy())) if tensor.device.type == "cpu" else tensor.sort().values


def _refuse(gradient: bool, is_finite_row: list[bool]) -> None:
    locations = [] if gradient else ["the gradient"]
    locations += [f"row {row} of the others" for row, finite in enumerate(is_finite_row) if not finite]
    raise InvalidValueError(
        f"Expected finite gradients but got NaN, infinity or too large a number in {', '.join(locations)}.",
        hint="Lower the learning rate, or clip the gradients.",
        argument="gradient",
        value=locations,
    )


def _weights(products: Matrix, margin: float) -> Matrix | None:
    """The dual variables v, shape (k,), or None where nothing is violated.

    Constraints become unit vectors, so that neither tolerances nor the regularisation depend on scales.
    """
    norms = np.sqrt(products.diagonal())
    rows = np.flatnonzero(norms[:-1])
    scale, length = norms[rows], float(norms[-1])
    slope = products[rows, -1] / scale
    if not len(rows) or slope.min() >= -_TOLERANCE * length:
        return None
    unit = products[np.ix_(rows, rows)] / np.outer(scale, scale)
    # What the margin adds at least is added beforehand: the rest of the weights is not negative.
    min_weights = margin * scale
    squared_increase = float(min_weights @ (2 * slope + unit @ min_weights))
    slope, length = slope + unit @ min_weights, float(np.sqrt(length**2 + max(squared_increase, 0.0)))
    weights = np.zeros(len(norms) - 1)
    weights[rows] = (min_weights + length * _solve(unit, slope / length)) / scale
    return weights


def _solve(unit: Matrix, slope: Matrix) -> Matrix:
    """``argmin_v 1/2 v^T unit v + slope^T v`` such that ``v >= 0``, for slopes of at most 1; NaN if none is found."""
    if slope.min() >= -_TOLERANCE:  # the margin alone was enough
        return np.zeros_like(slope)
    if len(slope) == 1:
        return -slope
    for solver in (_by_quadprog, _by_active_sets)[_FIRST:]:
        for ridge in (1e-14 * len(slope), 1e-11 * len(slope)):
            weights = _refine(solver, unit, slope, ridge)
            if weights is not None:
                return weights
        warnings.warn(f"`{solver.__name__[1:]}` found no projection of a gradient.", stacklevel=4)
    return np.full_like(slope, np.nan)


def _refine(solver: Solver, unit: Matrix, slope: Matrix, ridge: float) -> Matrix | None:
    """Weights that satisfy all constraints, if they are found.

    Solvers want a definite matrix, which a ridge makes of ``unit``. It pulls towards the weights of the iteration
    before (a proximal point method), so that its bias vanishes; one iteration does, unless constraints are nearly
    opposite.
    """
    weights, regular = np.zeros_like(slope), unit + ridge * np.eye(len(slope))
    for _ in range(100):
        try:
            weights = np.maximum(solver(regular, slope - ridge * weights), 0)
        except (ValueError, RuntimeError, np.linalg.LinAlgError):
            return None
        if (unit @ weights + slope).min() >= -_TOLERANCE:  # not if it is NaN
            return weights
    return None


def _by_quadprog(matrix: Matrix, slope: Matrix) -> Matrix:
    """The quadratic program by Goldfarb and Idnani's active sets, compiled."""
    import quadprog

    weights: Matrix = quadprog.solve_qp(matrix, -slope, np.eye(len(slope)), np.zeros_like(slope))[0]
    return weights


def _by_active_sets(matrix: Matrix, slope: Matrix) -> Matrix:
    """The same as non-negative least squares by Lawson and Hanson's active sets, in NumPy."""
    weights, free = np.zeros_like(slope), np.zeros(len(slope), dtype=bool)
    for _ in range(10 * len(slope)):
        gain = np.where(free, 0.0, -(matrix @ weights + slope))
        if gain.max() <= _TOLERANCE / 4:
            break
        free[gain.argmax()] = True
        while True:
            best = np.zeros_like(slope)
            best[free] = np.linalg.solve(matrix[np.ix_(free, free)], -slope[free])
            leaving = free & (best <= 0)
            if not leaving.any():
                break
            share = weights[leaving] / (weights[leaving] - best[leaving])
            weights = weights + share.min() * (best - weights)
            free[np.flatnonzero(leaving)[share.argmin()]] = False
        weights = best
    return weights


@torch.no_grad()
def gram_matrix(rows: Tensor, last: Tensor) -> Matrix:
    """Products of the vectors ``rows``, shape (k, p), and ``last`` with each other: shape (k + 1, k + 1), float64.

    On a CPU, dot products of pieces that were just converted: half of them suffice, as the matrix is symmetric, and
    with so few vectors a matrix product spends most of its time on rearranging them.
    """
    return _by_dots(rows, last) if solver_device(last).type == "cpu" else _by_matrix_products(rows, last)


def solver_device(tensor: Tensor) -> torch.device:
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
    vectors = wide[:count, :, None].transpose(0, 1).numpy()
    sums, products = np.zeros((blocks, count, offsets)), np.empty((blocks, count, offsets))
    for start in range(0, length, flat.shape[1]):
        size = min(flat.shape[1], length - start)
        piece = rows[:, start : start + size]
        flat[: count - 1, :size].copy_(piece)
        flat[count - 1, :size].copy_(last[start : start + size])
        flat[count:, :size].copy_(piece[: offsets - 1])
        flat[:, size:] = 0
        with np.errstate(all="ignore"):
            sums += np.vecdot(ring, vectors, out=products, order="C")  # block by block, not row by row
    first = np.arange(count)[:, None]
    second = (first + np.arange(offsets)) % count
    result = np.empty((count, count))
    result[first, second] = result[second, first] = sums.sum(axis=0)
    return result


def _by_matrix_products(rows: Tensor, last: Tensor) -> Matrix:
    products = torch.zeros(len(rows) + 1, len(rows) + 1, dtype=torch.float64, device=solver_device(last))
    pieces = zip(torch.split(rows, _MATRIX_PIECE, dim=1), torch.split(last, _MATRIX_PIECE), strict=True)
    for piece, end in pieces:
        wide = torch.cat([_wide(piece), _wide(end)[None]])
        products.addmm_(wide, wide.T)
    result: Matrix = products.cpu().numpy()
    return result
