"""Projection of gradients, so that a step for one task does not increase other tasks' losses to first order."""

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

# Tolerance for cosines between a projected gradient and the constraints. With rounding errors of double precision, each
# cosine is at least -1e-8.
_TOLERANCE = 4e-9
# Number of coordinates that are combined at once. A dozen gradients of this length fit into a processor core's cache.
_PIECE = 16384
# Number of coordinates per part of the result. A part stays in the cache while gradients are added to it.
_STRETCH = 2**18
# Minimum number of coordinates of gradients in single or double precision that are summed in their own precision. All
# other gradients, and sums whose large terms cancel, are computed in double precision.
_LONG = 100_000
# Index of the first solver to try: 0 for quadprog, 1 for the solver in NumPy.
_FIRST = 0 if find_spec("quadprog") else 1

# Number of coordinates per partial dot product. Blocks of this length stay in the cache of a processor core.
_BLOCK = 2048
# Number of values that are converted to double precision at once. They take 4 MiB, which fits into a cache.
_CONVERTED = 2**19
# Number of coordinates per matrix product on devices other than the CPU.
_MATRIX_PIECE = 2**21


@torch.no_grad()
def project(gradient: Tensor, constraints: Tensor, margin: float = 0.0) -> Tensor:
    """Project a gradient so that the result does not point away from any constraint gradient.

    For ``margin=0``, solves ``min_g' 1/2 ||g' - g||^2`` subject to ``<g', g_i> >= 0`` for all rows ``g_i`` of G. The
    dual problem has one variable per constraint: ``min_v 1/2 v^T G G^T v + g^T G^T v`` subject to ``v >= margin``, and
    ``g' = G^T v + g`` (GEM, Lopez-Paz and Ranzato, 2017, eq. 11 and 12; FedViT, eq. 7 to 9).

    Dot products are computed in double precision and divided by the norms, so that the scales of the gradients do not
    matter. If ``margin`` is 0, ``<g', g_i> / (||g|| ||g_i||)`` is at least -1e-8, except for rounding errors in the
    dtype of ``gradient``. Rows may be zero, equal, or linearly dependent.

    Args:
        gradient: The gradient g, shape (p,).
        constraints: The constraint gradients G, shape (k, p).
        margin: Lower bound of the dual variables.

    Returns:
        The projected gradient, shape (p,). It is ``gradient`` itself if no constraint is violated, for every margin, as
        in the code of GEM's authors. If ``margin`` is 0, the projected gradient is never longer than ``gradient``. All
        values are 0 if no solver finds a projection.

    Raises:
        InvalidValueError: If a gradient has non-finite values.
    """
    products = _gram(gradient, constraints)
    weights = _weights(products, margin)
    if weights is None:
        return gradient
    if not np.isfinite(weights).all():
        # A zero step violates no constraint.
        return torch.zeros_like(gradient)
    return _combine(gradient, constraints, weights, products)


@torch.no_grad()
def agem(gradient: Tensor, reference: Tensor) -> Tensor:
    """Return the vector nearest to ``gradient`` that does not point away from one reference gradient.

    g is ``gradient``, and g_ref is ``reference``. If ``g^T g_ref < 0``, the result is
    ``g - (g^T g_ref / g_ref^T g_ref) g_ref`` (A-GEM, Chaudhry et al., 2019, eq. 11). Otherwise, the result is
    ``gradient`` itself.
    """
    products = _gram(gradient, reference[None])
    if products[0, 1] >= 0:
        return gradient
    return _combine(gradient, reference[None], -products[:1, 1] / products[0, 0], products)


@torch.no_grad()
def gradient_distance(gradient: Tensor, references: Tensor, kind: DistanceKind = "wasserstein") -> Tensor:
    """Return the distance of each reference from a gradient, shape (k,), float64, on the CPU.

    Args:
        gradient: The gradient, shape (p,).
        references: The other gradients, shape (k, p).
        kind: ``"wasserstein"``: the distance between the distributions of coordinates, ``mean |sort(a) - sort(b)|``.
            This distance ignores the order of the coordinates. ``"cosine"``: 1 - the cosine of the angle between the
            gradients, and 1 for a zero gradient.

    Raises:
        InvalidValueError: If a gradient has non-finite values.
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
    """Return the indices of the ``k`` references farthest from a gradient, farthest first.

    FedViT calls the tasks of these gradients signature tasks (section 3.3).
    """
    return gradient_distance(gradient, references, kind).argsort(descending=True, stable=True)[:k]


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the values of named tensors as one vector, in the order of the mapping."""
    return torch.cat([value.reshape(-1) for value in tensors.values()])


def unflatten(flat: Tensor, reference: Mapping[str, Tensor]) -> State:
    """Return a vector from `flatten` as named tensors, with the names and shapes of ``reference``."""
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
        # Sums in the gradient's own precision are sufficient: the rounding errors of many coordinates average out,
        # unless large terms cancel each other.
        active = np.flatnonzero(weights * lengths[:-1] > 1e-15 * lengths[-1])
        if constraints.stride(1) != 1 or 3 * len(active) > 2 * len(weights):
            return torch.addmv(gradient, constraints.T, torch.from_numpy(weights).to(gradient))
        result = gradient.clone(memory_format=torch.contiguous_format)
        # Constraints with zero weight are not read.
        for start in range(0, len(gradient), _STRETCH):
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
    # On a CPU, NumPy sorts many times faster than torch.
    return torch.from_numpy(np.sort(tensor.numpy())) if tensor.device.type == "cpu" else tensor.sort().values


def _refuse(gradient: bool, is_finite_row: list[bool]) -> None:
    locations = [] if gradient else ["the gradient"]
    locations += [f"reference gradient {row}" for row, finite in enumerate(is_finite_row) if not finite]
    raise InvalidValueError(
        f"Expected finite gradients, but got NaN, infinity or too large values in {', '.join(locations)}.",
        hint="Lower the learning rate, or clip the gradients.",
        argument="gradient",
        value=locations,
    )


def _weights(products: Matrix, margin: float) -> Matrix | None:
    """Return the dual variables v, shape (k,), or None if no constraint is violated.

    Constraints are scaled to unit vectors, so that neither the tolerances nor the regularization depend on scales.
    """
    norms = np.sqrt(products.diagonal())
    rows = np.flatnonzero(norms[:-1])
    scale, length = norms[rows], float(norms[-1])
    slope = products[rows, -1] / scale
    if not len(rows) or slope.min() >= -_TOLERANCE * length:
        return None
    unit = products[np.ix_(rows, rows)] / np.outer(scale, scale)
    # Add the minimum weights, which the margin requires, first. The remaining weights are then at least 0.
    min_weights = margin * scale
    squared_increase = float(min_weights @ (2 * slope + unit @ min_weights))
    slope, length = slope + unit @ min_weights, float(np.sqrt(length**2 + max(squared_increase, 0.0)))
    weights = np.zeros(len(norms) - 1)
    weights[rows] = (min_weights + length * _solve(unit, slope / length)) / scale
    return weights


def _solve(unit: Matrix, slope: Matrix) -> Matrix:
    """Return ``argmin_v 1/2 v^T unit v + slope^T v`` subject to ``v >= 0``, or NaN if no solver succeeds.

    The slopes are at most 1 in absolute value.
    """
    # The minimum weights, which the margin requires, can already satisfy all constraints.
    if slope.min() >= -_TOLERANCE:
        return np.zeros_like(slope)
    if len(slope) == 1:
        return -slope
    for solver in (_by_quadprog, _by_active_sets)[_FIRST:]:
        for ridge in (1e-14 * len(slope), 1e-11 * len(slope)):
            weights = _refine(solver, unit, slope, ridge)
            if weights is not None:
                return weights
        warnings.warn(
            f"The solver `{solver.__name__.removeprefix('_by_')}` found no projection of a gradient. If all solvers "
            "fail, the projected gradient is 0.",
            stacklevel=4,
        )
    return np.full_like(slope, np.nan)


def _refine(solver: Solver, unit: Matrix, slope: Matrix, ridge: float) -> Matrix | None:
    """Return weights that satisfy all constraints, or None if the solver does not find any.

    Solvers need a positive definite matrix, so a ridge is added to ``unit``. The ridge pulls towards the weights of the
    previous iteration (a proximal point method), so that its bias vanishes. One iteration is sufficient unless
    constraints are nearly opposite.
    """
    weights, regular = np.zeros_like(slope), unit + ridge * np.eye(len(slope))
    for _ in range(100):
        try:
            weights = np.maximum(solver(regular, slope - ridge * weights), 0)
        except (ValueError, RuntimeError, np.linalg.LinAlgError):
            return None
        # This is False if a weight is NaN.
        if (unit @ weights + slope).min() >= -_TOLERANCE:
            return weights
    return None


def _by_quadprog(matrix: Matrix, slope: Matrix) -> Matrix:
    """Return the solution of the quadratic program in `_solve` by quadprog (Goldfarb and Idnani, compiled)."""
    import quadprog

    weights: Matrix = quadprog.solve_qp(matrix, -slope, np.eye(len(slope)), np.zeros_like(slope))[0]
    return weights


def _by_active_sets(matrix: Matrix, slope: Matrix) -> Matrix:
    """Return the solution of the quadratic program in `_solve` by active sets (Lawson and Hanson), in NumPy.

    The problem is a non-negative least-squares problem.
    """
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
    """Return the dot products of all pairs of the vectors ``rows``, shape (k, p), and ``last``.

    On a CPU, dot products of freshly converted pieces are faster than a matrix product. The matrix is symmetric, so
    half of the products is sufficient. With few vectors, a matrix product spends most of its time on rearranging them.

    Args:
        rows: The first k vectors, shape (k, p).
        last: The last vector, shape (p,).

    Returns:
        The Gram matrix, shape (k + 1, k + 1), float64.
    """
    return _by_dots(rows, last) if solver_device(last).type == "cpu" else _by_matrix_products(rows, last)


def solver_device(tensor: Tensor) -> torch.device:
    """Return a device with double precision for a tensor: the CPU for Apple's GPUs, otherwise the tensor's device."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device


def _by_dots(rows: Tensor, last: Tensor) -> Matrix:
    """Return the dot products of all pairs of vectors, as in `gram_matrix`.

    The vectors are ordered in a ring. Each vector is multiplied by itself and by the vectors that follow it, up to half
    of the ring. Every pair is then computed once. If the number of vectors is even, opposite pairs are computed twice.
    """
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
            # This order makes `vecdot` proceed block by block, not row by row.
            sums += np.vecdot(ring, vectors, out=products, order="C")
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
