"""Ridge regression from sums: a linear readout that is trained in one pass, merged, and unlearned exactly."""

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

_ROUNDING = 100  # how much larger than those of one operation the rounding errors of a sum of products may be

log = logging.getLogger(__name__)

# Rows that are turned to double precision at once: they stay in the cache until they are multiplied.
CHUNK_SIZE = 4096
# Rows of S S^T that are computed at once, from the diagonal on: what is below it is the same.
STRIPE_SIZE = 128


class DoublePrecision(Serializable):
    """A module whose buffers of double precision stay so when it follows others to a device or another type."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        wide = {name: value for name, value in self.named_buffers(recurse=False) if value.dtype is torch.float64}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in wide.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self


class RidgeReadout(DoublePrecision):
    """A linear map from states to outputs by ridge regression: ``W = A (B + beta I)^-1`` (Bacciu et al. 2021, eq. 10).

    It learns ``A = Y S^T``, ``B = S S^T`` and the number of samples (eq. 6-9 and 11-12, with the regulariser left out:
    it is added once, in the solution), which readouts of one reservoir can add to each other's and take away again.

    Args:
        in_features: Size of the states, N_R.
        out_features: Size of the outputs, N_Y.
        beta: Regulariser, above or equal 0. It is no part of the statistics: added to each client's B, as in the
            paper's eq. 7 and 9, it would count once per client.
        symmetric: Whether only the upper triangle of B is kept and sent: half the bytes.
        rank: Of B only so many leading singular values and vectors are kept, as their products, shape (rank, N_R), and
            the solution lies in the space that they span (FedRAN); None: all of B.

    Raises:
        ValueError: If ``beta`` is below 0, ``rank`` is no number of states, another readout is of another reservoir or
            shape, or one is to be taken away from a readout of low rank.

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
        """Outputs of shape (..., out_features), float64, from states of shape (..., in_features)."""
        return states.double() @ self.weight.t()

    def reset(self, tag: int = 0) -> None:
        """Forget all statistics, to begin with those of another reservoir; the weights stay until the next `solve`."""
        for value in (self.A, self.B, self.n):
            value.zero_()
        self.tag.fill_(tag)

    def partial_fit(self, states: Tensor, targets: Tensor) -> None:
        """Add samples: states of shape (n, in_features) and targets of shape (n, out_features)."""
        if self.rank is None:
            accumulate(self.A, self.B, states, targets)
        else:
            accumulate_rows(self.A, self.B, states, targets)
            self.B.copy_(leading_rows(self.B, self.rank))  # no sample's own states are kept
        self.n += len(states)

    def merge(self, other: RidgeReadout) -> None:
        """Add the samples of another readout of the same reservoir (`EchoStateNetwork.weights_hash`) and shape."""
        self._check(other)
        self.A += other.A
        self.B.copy_(self.B + other.B if self.rank is None else leading_rows(torch.cat([self.B, other.B]), self.rank))
        self.n += other.n

    def unlearn(self, other: RidgeReadout) -> None:
        """Take samples away that were added before, by a readout that has learnt from them alone: unlearning."""
        self._check(other)
        if self.rank is not None:
            raise InvalidValueError(
                f"Expected a readout with all of B to take samples away from but got one of rank {self.rank}: what "
                "was cut off of all samples together tells nothing of some.",
                hint="Make both readouts without `rank`.",
                argument="rank",
                value=self.rank,
            )
        if other.n > self.n:
            raise InvalidValueError(
                f"Expected a readout of at most {self.n} samples to take away but got {other.n}, never added.",
                argument="n",
                value=int(other.n),
            )
        self.A -= other.A
        self.B -= other.B
        self.n -= other.n

    def _check(self, other: RidgeReadout) -> None:
        if self.tag != other.tag:
            raise InvalidValueError(
                f"Expected a readout of the reservoir {int(self.tag):x} but got one of {int(other.tag):x}: other "
                "weights, gain or bias.",
                hint="Compute it again with this reservoir.",
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
        """Set the weights from the statistics."""
        if self.rank is None:
            self.weight.copy_(solve(self.A, unpack_upper(self.B, self.in_features), self.beta))
        else:
            self.weight.copy_(self.solve_path([self.beta])[0])

    def solve_path(self, betas: Sequence[float]) -> Tensor:
        """The weights for each of several regularisers, shape (betas, outputs, features), by one eigendecomposition."""
        _check_finite(self.A, self.B)
        if self.rank is not None:
            _, sizes, rows = torch.linalg.svd(self.B, full_matrices=False)
            values = sizes.square()
            is_significant = values > _ROUNDING * _cut_off(values)  # what lies outside would be divided by beta alone
            return _from_spectrum(self.A, values[is_significant], rows[is_significant].t(), betas)
        return _by_eigenvalues(self.A, unpack_upper(self.B, self.in_features), betas)[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, beta={self.beta}, symmetric={self.symmetric}"


def accumulate(a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
    """Add ``targets^T states`` to ``a`` and ``states^T states`` to ``b`` (square or packed), in double precision."""
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
    """As `accumulate`, but ``b``, shape (rows, features), holds the states, or their `leading_rows` if it is full."""
    a.addmm_(targets.double().t(), states.double())
    rows = torch.cat([b[b.any(dim=1)], states.double()])
    b.copy_(F.pad(rows, (0, 0, 0, len(b) - len(rows))) if len(rows) <= len(b) else leading_rows(rows, len(b)))


def leading_rows(rows: Tensor, rank: int) -> Tensor:
    """The leading singular values of rows times their right vectors, shape (rank, features), filled up with zeros."""
    if not torch.isfinite(rows).all():
        return torch.full_like(rows[:1], torch.nan).expand(rank, -1)  # no client that sends it is taken in
    rows = rows[rows.any(dim=1)]
    if len(rows) > rows.shape[1]:
        rows = torch.linalg.qr(rows, mode="r").R
    _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    return F.pad((sizes[:, None] * vectors)[:rank], (0, 0, 0, max(0, rank - len(sizes))))


class GroupMoments(DoublePrecision):
    """Sums and numbers of each class's samples in random groups, from which B can be estimated (STSA-E).

    Args:
        groups: Number of groups into which a client's samples fall.
        classes: Number of classes.
        features: Size of the states.

    Raises:
        ValueError: If there is not one group at least.
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
        """The estimate of S^T S of all samples, shape (features, features).

        ``Sum_c [a_c Sum_j s_jc s_jc^T / n_jc - b_c P_c P_c^T]`` with ``a_c = (N_c - 1) / (K_c - 1)`` and ``b_c = (N_c -
        K_c) / ((K_c - 1) N_c)``: ``s_jc`` and ``n_jc`` are sum and number of class c in group j, ``P_c`` and ``N_c``
        those of all ``K_c`` groups that hold it. Right on average over random groupings, and exact where each group has
        one sample. Of a class in one group alone only that group's mean is known.
        """
        n, groups = self.counts.sum(dim=0).double(), (self.counts > 0).sum(dim=0)
        num_other_groups = (groups - 1).clamp(min=1)
        a = torch.where(groups > 1, (n - 1) / num_other_groups, 1.0)
        b = torch.where(groups > 1, (n - groups) / (num_other_groups * n), 0.0)
        scaled = self.sums * (a / self.counts.clamp(min=1)).sqrt()[..., None]
        plus, minus = scaled[self.counts > 0], self.sums.sum(dim=0) * b.sqrt()[:, None]
        return plus.t() @ plus - minus.t() @ minus


def accumulate_groups(sums: Tensor, counts: Tensor, states: Tensor, targets: Tensor) -> None:
    """Add samples to a client's `GroupMoments`: its samples, which come in random order, to the groups in turn."""
    groups, classes = counts.shape
    turns = int(counts.sum()) + torch.arange(len(states), device=states.device)
    indices = turns % groups * classes + targets.argmax(dim=1)
    sums.view(-1, sums.shape[-1]).index_add_(0, indices, states.double())
    counts.view(-1).index_add_(0, indices, torch.ones_like(indices))


def add_to_diagonal(b: Tensor, size: int, value: float) -> None:
    """Add a number to the diagonal of a matrix, square or packed."""
    if b.dim() == 2:
        b.diagonal().add_(value)
    else:
        lengths = torch.arange(size, 0, -1, device=b.device)  # of the packed rows, which begin on the diagonal
        b[lengths.cumsum(0) - lengths] += value


def pack_upper(full: Tensor) -> Tensor:
    """The upper triangle of a matrix, row after row."""
    return full.flatten().index_select(0, _upper(*full.shape, full.device))


@lru_cache(maxsize=64)
def _upper(rows: int, columns: int, device: torch.device) -> Tensor:
    """Where the upper triangle is among a matrix's numbers, row after row."""
    indices: Tensor = torch.triu_indices(rows, columns, dtype=torch.int32, device=device)
    return indices[0] * columns + indices[1]


def unpack_upper(b: Tensor, size: int) -> Tensor:
    """A symmetric matrix from its packed upper triangle; a square one is returned as it is."""
    if b.dim() == 2:
        return b
    full = b.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size, device=b.device)
    full[rows, columns] = b
    full[columns, rows] = b
    return full


def solve(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """``a (b + beta I)^-1`` in double precision: by Cholesky, or by eigenvalues where ``beta`` is lost in rounding."""
    a, b = a.double(), b.double()
    _check_finite(a, b)
    # Rounding may leave a singular matrix positive: only a regulariser above all rounding errors says that it is none.
    if beta > _ROUNDING * _cut_off(b.diagonal().sum().expand(len(b))):  # the trace is above all eigenvalues
        factor, error_code = torch.linalg.cholesky_ex(b + beta * torch.eye(len(b), dtype=b.dtype, device=b.device))
        if not error_code:
            return torch.cholesky_solve(a.t(), factor).t()
    weights, rank = _by_eigenvalues(a, b, [beta])
    if rank < len(b):
        log.warning(
            "B + beta I is not positive definite (beta = %g): solved by eigenvalues, the smallest of them left out. "
            "Raise `beta` to have one solution only.",
            beta,
        )
    return weights[0]


def _by_eigenvalues(a: Tensor, b: Tensor, betas: Sequence[float]) -> tuple[Tensor, int]:
    """``a (b + beta I)^-1`` for each beta, shape (betas, outputs, features), and the rank of b.

    An eigenvalue of b that may be nothing but rounding errors counts as 0; without a beta the least solution is taken.
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
            "Expected finite statistics but they hold NaN or infinite values.",
            hint="Leave out the clients with such statistics.",
            argument="A",
        )


def _cut_off(values: Tensor) -> Tensor:
    """The size of the rounding errors of eigenvalues."""
    return values.abs().max() * len(values) * torch.finfo(values.dtype).eps
