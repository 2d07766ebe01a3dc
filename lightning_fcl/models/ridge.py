"""Ridge regression from summed statistics: a linear readout with one-pass training, exact merging and unlearning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least, between

# Factor by which the rounding errors of a sum of products can exceed the rounding error of one operation.
_ROUNDING = 100

# Smallest ratio of two eigenvalues of a product ``rows rows^T`` at which the smaller eigenvalue is used. The rounding
# errors of the eigenvalues are about 2e-16 times the largest eigenvalue.
_SMALLEST_EIGENVALUE = 1e-6

# Largest product of two unit vectors that count as orthogonal.
_ORTHOGONAL = 1e-12

log = logging.getLogger(__name__)

# Number of rows that are converted to double precision at once. The converted rows then fit into the CPU cache.
CHUNK_SIZE = 4096
# Number of rows of ``states^T states`` that are computed at once. Only the upper triangle is computed.
STRIPE_SIZE = 128


class DoublePrecision(Serializable):
    """A module whose float64 buffers stay float64 when the module is moved or converted."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        wide = {name: value for name, value in self.named_buffers(recurse=False) if value.dtype is torch.float64}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in wide.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self


class RidgeReadout(DoublePrecision):
    """A linear map from states to outputs by ridge regression: ``W = A (B + beta I)^-1`` (Bacciu et al., 2021, eq. 10).

    The statistics are ``A = Y S^T``, ``B = S S^T`` and the number of samples (eq. 6-9 and 11-12). Each column of S is
    the state of a sample, and each column of Y is its target. The statistics do not contain the regularizer ``beta``,
    which is added once, in the solution. The statistics of readouts of the same reservoir can be added. Without
    ``rank``, they can also be subtracted.

    Args:
        in_features: Size of the states, N_R.
        out_features: Size of the outputs, N_Y.
        beta: Regularizer, at least 0. In the paper's eq. 7 and 9, beta is part of each client's B, so that the sum over
            clients would contain beta once per client.
        symmetric: Whether to store and upload only the upper triangle of B, which is about half of the bytes. Has no
            effect if ``rank`` is set.
        rank: Number of leading singular values and right singular vectors of the states to keep instead of B. The
            buffer ``B`` then contains their products, shape (rank, N_R). The solution is restricted to the space of
            these vectors (FedRAN). If None, B is kept completely.

    Raises:
        ValueError: If ``beta`` is below 0 or non-finite, or ``rank`` is not between 1 and ``in_features``. `merge` and
            `unlearn` raise ValueError if the two readouts have different reservoirs or shapes. `unlearn` also raises
            ValueError if ``rank`` is set, or if the other readout has more samples.

    Example:
        >>> readout = RidgeReadout(2, 1, beta=0.0)
        >>> states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> readout.partial_fit(states, targets=states @ torch.tensor([[2.0], [3.0]]))
        >>> readout.solve()
        >>> [[round(value, 6) for value in row] for row in readout.weight.tolist()]
        [[2.0, 3.0]]
    """

    A: Tensor
    B: Tensor
    n: Tensor
    tag: Tensor
    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        beta: float = 1e-3,
        symmetric: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= beta < float("inf"):
            raise InvalidValueError(
                f"Expected `beta` to be at least 0 and finite but got {beta}.", argument="beta", value=beta
            )
        self.in_features = in_features
        self.out_features = out_features
        self.beta = beta
        self.symmetric = symmetric
        self.rank = rank
        size = (in_features * (in_features + 1) // 2,) if symmetric else (in_features, in_features)
        if rank is not None:
            between(1, in_features, rank=rank)
            size = (rank, in_features)
        self.register_buffer("A", torch.zeros(out_features, in_features, dtype=torch.float64))
        self.register_buffer("B", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("tag", torch.zeros((), dtype=torch.long))
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.float64))

    def forward(self, states: Tensor) -> Tensor:
        """Return outputs of shape (..., out_features) in float64 from states of shape (..., in_features)."""
        return states.double() @ self.weight.t()

    def reset(self, tag: int = 0) -> None:
        """Reset all statistics, for example to use another reservoir. The weights are kept until the next `solve`.

        Args:
            tag: Hash of the new reservoir, see `EchoStateNetwork.weights_hash`.
        """
        for value in (self.A, self.B, self.n):
            value.zero_()
        self.tag.fill_(tag)

    def partial_fit(self, states: Tensor, targets: Tensor) -> None:
        """Add samples with states of shape (n, in_features) and targets of shape (n, out_features)."""
        if self.rank is None:
            accumulate(self.A, self.B, states, targets)
        else:
            accumulate_rows(self.A, self.B, states, targets)
            # B then contains singular vectors. It does not contain the states of single samples.
            self.B.copy_(leading_rows(self.B, self.rank))
        self.n += len(states)

    def merge(self, other: RidgeReadout) -> None:
        """Add the statistics of another readout with the same shape and reservoir (`EchoStateNetwork.weights_hash`)."""
        self._check(other)
        self.A += other.A
        self.B.copy_(self.B + other.B if self.rank is None else leading_rows(torch.cat([self.B, other.B]), self.rank))
        self.n += other.n

    def unlearn(self, other: RidgeReadout) -> None:
        """Subtract the statistics of another readout. This readout must contain all samples of the other readout."""
        self._check(other)
        if self.rank is not None:
            raise InvalidValueError(
                f"Expected a readout with the complete B, but got a readout of rank {self.rank}: samples cannot be "
                "removed from a reduced B.",
                hint="Create both readouts without `rank`.",
                argument="rank",
                value=self.rank,
            )
        if other.n > self.n:
            raise InvalidValueError(
                f"Expected the number of samples to remove to be at most {self.n} but got {other.n}.",
                argument="n",
                value=int(other.n),
            )
        self.A -= other.A
        self.B -= other.B
        self.n -= other.n

    def _check(self, other: RidgeReadout) -> None:
        if self.tag != other.tag:
            raise InvalidValueError(
                f"Expected a readout of the reservoir with hash {int(self.tag):x}, but got hash {int(other.tag):x}. "
                "The weights, gain, bias, leaking rate or washout of the two reservoirs differ.",
                hint="Compute the other readout again with this reservoir.",
                argument="tag",
                value=int(other.tag),
            )
        if self.A.shape != other.A.shape or self.B.shape != other.B.shape:
            raise InvalidValueError(
                f"Expected A and B of shapes {tuple(self.A.shape)} and {tuple(self.B.shape)} but got "
                f"{tuple(other.A.shape)} and {tuple(other.B.shape)}.",
                argument="A",
            )

    def solve(self) -> None:
        """Compute the weights from the statistics."""
        if self.rank is None:
            self.weight.copy_(solve(self.A, unpack_upper(self.B, self.in_features), self.beta))
        else:
            self.weight.copy_(self.solve_path([self.beta])[0])

    def solve_noised(self, beta: float) -> None:
        """Compute the weights from statistics with symmetric noise, ``W = A (B + beta I)^-1``.

        The noise can make eigenvalues of B negative. Eigenvalues of ``B + beta I`` below ``beta / 4`` are replaced by
        ``beta / 4``.

        Args:
            beta: Regularizer, above 0.
        """
        _check_finite(self.A, self.B)
        values, vectors = torch.linalg.eigh(unpack_upper(self.B, self.in_features))
        inverse = 1 / (values + beta).clamp(min=beta / 4)
        self.weight.copy_(((self.A @ vectors) * inverse) @ vectors.t())

    def solve_path(self, betas: Sequence[float]) -> Tensor:
        """Return the weights for several regularizers, shape (betas, outputs, features), from one decomposition."""
        _check_finite(self.A, self.B)
        if self.rank is not None:
            sizes, rows = _singular_rows(self.B)
            values = sizes.square()
            # Components below this threshold are rounding errors. In the solution, they would be divided by a number
            # close to beta.
            is_significant = values > _ROUNDING * _cut_off(values)
            return _from_spectrum(self.A, values[is_significant], rows[is_significant].t(), betas)
        return _by_eigenvalues(self.A, unpack_upper(self.B, self.in_features), betas)[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, beta={self.beta}, symmetric={self.symmetric}"


def accumulate(a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
    """Add ``targets^T states`` to ``a`` and ``states^T states`` to ``b``, in place and in double precision.

    ``b`` is square, or a packed upper triangle.
    """
    if not len(states):
        return
    size = states.shape[1]
    for state_chunk, target_chunk in zip(
        torch.split(states, CHUNK_SIZE), torch.split(targets, CHUNK_SIZE), strict=True
    ):
        wide, end = state_chunk.double(), 0
        for i in range(0, size, STRIPE_SIZE):
            rows, columns = wide[:, i : i + STRIPE_SIZE].t(), wide[:, i:]
            if b.dim() == 2:
                b[i : i + STRIPE_SIZE, i:].addmm_(rows, columns)
            else:
                upper = pack_upper(rows @ columns)
                start, end = end, end + len(upper)
                b[start:end] += upper
        a.addmm_(target_chunk.double().t(), wide)
    for i in range(0, size if b.dim() == 2 else 0, STRIPE_SIZE):
        b[i + STRIPE_SIZE :, i : i + STRIPE_SIZE] = b[i : i + STRIPE_SIZE, i + STRIPE_SIZE :].t()


def accumulate_rows(a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
    """Add ``targets^T states`` to ``a``, and append the states to the rows of ``b``, shape (rows, features), in place.

    If ``b`` has too few empty rows, it is replaced by the `leading_rows` of all rows.
    """
    a.addmm_(targets.double().t(), states.double())
    rows = torch.cat([b[b.any(dim=1)], states.double()])
    b.copy_(F.pad(rows, (0, 0, 0, len(b) - len(rows))) if len(rows) <= len(b) else leading_rows(rows, len(b)))


def leading_rows(rows: Tensor, rank: int) -> Tensor:
    """Return the leading singular values of ``rows`` times their right singular vectors, shape (rank, features).

    If there are fewer than ``rank`` singular values, rows of zeros follow.
    """
    if not torch.isfinite(rows).all():
        # Return NaN, because the server rejects uploads that contain NaN.
        return torch.full_like(rows[:1], torch.nan).expand(rank, -1)
    rows = rows[rows.any(dim=1)]
    is_tall = len(rows) > rows.shape[1]
    # The eigenvectors of the smaller product are the singular vectors of one side. They take less than half of the time
    # of the singular value decomposition.
    values, vectors = torch.linalg.eigh(rows.t() @ rows if is_tall else rows @ rows.t())
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    if len(values) and values[-1] > _SMALLEST_EIGENVALUE * values[0]:
        leading = values.sqrt()[:, None] * vectors.t() if is_tall else vectors.t() @ rows
    else:
        if is_tall:
            rows = torch.linalg.qr(rows, mode="r").R
        _, sizes, right_vectors = torch.linalg.svd(rows, full_matrices=False)
        leading = (sizes[:, None] * right_vectors)[:rank]
    return F.pad(leading, (0, 0, 0, rank - len(leading)))


def _singular_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular values of a matrix and its right singular vectors as rows.

    The result of `leading_rows` has orthogonal rows, whose norms are the singular values.
    """
    sizes = rows.norm(dim=1)
    vectors = rows / sizes.where(sizes > 0, 1.0)[:, None]
    products = vectors @ vectors.t()
    if (products - products.diagonal().diag()).abs().max() > _ORTHOGONAL:
        _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    return sizes, vectors


class GroupMoments(DoublePrecision):
    """Sums of states and numbers of samples, for each class in each random group of a client's samples (STSA-E).

    `second_moments` estimates the statistic B of `RidgeReadout` from these sums.

    Args:
        groups: Number of groups into which a client's samples are divided.
        classes: Number of classes.
        features: Size of the states.

    Raises:
        ValueError: If ``groups`` is below 1.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, groups: int, classes: int, features: int) -> None:
        super().__init__()
        at_least(1, groups=groups)
        self.groups = groups
        self.register_buffer("sums", torch.zeros(groups, classes, features, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(groups, classes, dtype=torch.long))

    def second_moments(self) -> Tensor:
        """Return an estimate of the sum of ``s s^T`` over the states s of all samples, shape (features, features).

        The estimate is ``Sum_c [a_c Sum_j s_jc s_jc^T / n_jc - b_c P_c P_c^T]`` with ``a_c = (N_c - 1) / (K_c - 1)``
        and ``b_c = (N_c - K_c) / ((K_c - 1) N_c)``. ``s_jc`` and ``n_jc`` are the sum and number of samples of class c
        in group j. ``P_c`` and ``N_c`` are the sum and number of samples of class c in all groups. ``K_c`` is the
        number of groups with samples of class c.

        The estimate is unbiased over random groupings, and exact if each group has one sample. If a class has samples
        in only one group, the estimate uses the mean of this group. Deviation: in the authors' code, K_c is the number
        of all groups, which makes the estimate too small for rare classes. For example, if six of 25 groups have one
        sample of a class each, the authors' estimate is 5/24 of the exact sum.
        """
        n, groups = self.counts.sum(dim=0).double(), (self.counts > 0).sum(dim=0)
        num_other_groups = (groups - 1).clamp(min=1)
        a = torch.where(groups > 1, (n - 1) / num_other_groups, 1.0)
        b = torch.where(groups > 1, (n - groups) / (num_other_groups * n), 0.0)
        scaled = self.sums * (a / self.counts.clamp(min=1)).sqrt()[..., None]
        plus, minus = scaled[self.counts > 0], self.sums.sum(dim=0) * b.sqrt()[:, None]
        return plus.t() @ plus - minus.t() @ minus


def accumulate_groups(sums: Tensor, counts: Tensor, states: Tensor, targets: Tensor) -> None:
    """Add samples to the sums and counts of a client's `GroupMoments`. Consecutive samples go to consecutive groups.

    Pass the samples in random order.
    """
    groups, classes = counts.shape
    turns = int(counts.sum()) + torch.arange(len(states), device=states.device)
    indices = turns % groups * classes + targets.argmax(dim=1)
    sums.view(-1, sums.shape[-1]).index_add_(0, indices, states.double())
    counts.view(-1).index_add_(0, indices, torch.ones_like(indices))


def add_to_diagonal(b: Tensor, size: int, value: float) -> None:
    """Add a number to the diagonal of a matrix in place. The matrix is square, or a packed upper triangle."""
    if b.dim() == 2:
        b.diagonal().add_(value)
    else:
        # The packed rows start on the diagonal, and each row is one element shorter than the previous row.
        lengths = torch.arange(size, 0, -1, device=b.device)
        b[lengths.cumsum(0) - lengths] += value


def pack_upper(full: Tensor) -> Tensor:
    """Return the upper triangle of a matrix as a vector, row by row."""
    return full.flatten().index_select(0, _upper(*full.shape, full.device))


@lru_cache(maxsize=64)
def _upper(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the indices of the upper triangle in the flattened matrix, row by row."""
    indices: Tensor = torch.triu_indices(rows, columns, dtype=torch.int32, device=device)
    return indices[0] * columns + indices[1]


def unpack_upper(b: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix of a packed upper triangle. A square matrix is returned unchanged."""
    if b.dim() == 2:
        return b
    full = b.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size, device=b.device)
    full[rows, columns] = b
    full[columns, rows] = b
    return full


def solve(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """Return ``a (b + beta I)^-1`` in double precision.

    The Cholesky decomposition is used. If ``beta`` is not above the rounding errors, or if Cholesky fails, an
    eigendecomposition is used.
    """
    a, b = a.double(), b.double()
    _check_finite(a, b)
    # Rounding can make a singular matrix positive definite, so Cholesky needs a `beta` above all rounding errors. No
    # eigenvalue is larger than the trace.
    if beta > _ROUNDING * _cut_off(b.diagonal().sum().expand(len(b))):
        factor, error_code = torch.linalg.cholesky_ex(b + beta * torch.eye(len(b), dtype=b.dtype, device=b.device))
        if not error_code:
            return torch.cholesky_solve(a.t(), factor).t()
    weights, rank = _by_eigenvalues(a, b, [beta])
    if rank < len(b):
        log.warning(
            "The matrix B + beta I of the ridge regression may not be positive definite (beta = %g). The solution "
            "ignores eigenvalues of B that may be rounding errors. Increase `beta` for a unique solution.",
            beta,
        )
    return weights[0]


def _by_eigenvalues(a: Tensor, b: Tensor, betas: Sequence[float]) -> tuple[Tensor, int]:
    """Return ``a (b + beta I)^-1`` for each beta, shape (betas, outputs, features), and the rank of b.

    Eigenvalues of b that may be rounding errors count as 0. For beta = 0, the solution of least norm is returned.
    """
    values, vectors = torch.linalg.eigh(b)
    is_significant = values > _ROUNDING * _cut_off(values)
    return _from_spectrum(a, torch.where(is_significant, values, 0.0), vectors, betas), int(is_significant.sum())


def _from_spectrum(a: Tensor, values: Tensor, vectors: Tensor, betas: Sequence[float]) -> Tensor:
    scales = values + torch.tensor(betas, dtype=torch.float64, device=values.device)[:, None]
    inverse = torch.where(scales > _cut_off(values), 1 / scales, 0.0)
    weights: Tensor = ((a @ vectors) * inverse[:, None, :]) @ vectors.t()
    return weights


def _check_finite(a: Tensor, b: Tensor) -> None:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise InvalidValueError(
            "Expected finite statistics, but they contain NaN or infinite values.",
            hint="Leave out the clients with such statistics.",
            argument="A",
        )


def _cut_off(values: Tensor) -> Tensor:
    """Return the magnitude of the rounding errors of eigenvalues."""
    return values.abs().max() * len(values) * torch.finfo(values.dtype).eps
