"""What a readout should say of samples, and what clients add up of both for a ridge regression, and send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import Accumulator, GatheringAccumulator, State, nonzero_rows
from lightning_fcl.federation.aggregation import ReductionRules
from lightning_fcl.federation.packing import pack_nonzero, unpack_nonzero
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.models.ridge import accumulate, accumulate_groups, accumulate_rows, leading_rows
from lightning_fcl.validation import at_least


class OneHot:
    """Classes: 1 for a sample's own and 0, or -1, for the others; the largest output wins."""

    quantity = "accuracy"

    def __init__(self, num_classes: int, signed: bool = False) -> None:
        at_least(1, num_classes=num_classes)
        self.num_outputs = num_classes
        self.signed = signed

    def encode(self, y: Tensor) -> Tensor:
        """What the readout should say of samples: (batch, outputs), or (batch, time, outputs) for every step."""
        if y.is_floating_point():
            raise InvalidValueError(
                f"Expected whole numbers as labels but got {y.dtype}.",
                hint="Use `y.long()` for labels, or a `ReservoirRegressor` for numbers.",
                argument="y",
                value=y.dtype,
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_outputs:
            wrong = int(y[(y < 0) | (y >= self.num_outputs)][0])
            raise InvalidValueError(
                f"Expected labels between 0 and {self.num_outputs - 1} but got {wrong}.",
                hint="Set `num_classes` to the data's number of classes.",
                argument="num_classes",
                value=wrong,
            )
        targets = F.one_hot(y.long(), self.num_outputs).double()
        return targets * 2 - 1 if self.signed else targets

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How good each of several readouts is, the more the better: (..., readouts, outputs), (..., outputs)."""
        right = outputs.argmax(dim=-1) == targets.argmax(dim=-1)[..., None]
        return right.double().flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MulticlassAccuracy(self.num_outputs, average="micro")

    def to_predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the metric compares: of outputs and targets, both of shape (..., outputs)."""
        return outputs.argmax(dim=-1).flatten(), targets.argmax(dim=-1).flatten()


class RealTargets:
    """Numbers, by their squared error."""

    quantity = "error"

    def __init__(self, num_outputs: int) -> None:
        at_least(1, num_outputs=num_outputs)
        self.num_outputs = num_outputs

    def encode(self, y: Tensor) -> Tensor:
        if y.dim() not in (2, 3) or y.shape[-1] != self.num_outputs:
            raise InvalidValueError(
                f"Expected targets of shape (batch, {self.num_outputs}), or (batch, time, {self.num_outputs}), but got "
                f"{tuple(y.shape)}.",
                hint="Set `num_outputs` to the target's size.",
                argument="num_outputs",
                value=tuple(y.shape),
            )
        if not torch.isfinite(y).all():
            raise InvalidValueError(
                "Expected finite targets but got NaN or infinite values.",
                hint="Correct or drop these sequences.",
                argument="y",
            )
        return y.double()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets[..., None, :]).square().sum(dim=-1).flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MeanSquaredError()

    def to_predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.float().flatten(), targets.float().flatten()


ReadoutTargets = OneHot | RealTargets


class ConcatReduction(Reduction):
    """Uploads of a round, all at once. Zeros do not travel."""

    is_downloaded = False

    def initial_value(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        return pack_nonzero(value)

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        return unpack_nonzero(packed, reference)


class ConcatRows(ConcatReduction):
    """The leading rows of the server's and of all uploads' rows, so many as ``rank`` says."""

    name = "concat_rows"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(self._join_rows, nonzero_rows)

    def _join_rows(self, rows: Mapping[str, list[Tensor]], server: Mapping[str, Tensor]) -> State:
        return {name: leading_rows(torch.cat([server[name], *given]), self.rank) for name, given in rows.items()}


class ConcatGroups(ConcatReduction):
    """Sums and numbers of each class's samples in the groups of all clients, without the groups that have none of it.

    A client has few of the classes in few of its groups: what is kept of it until the others have come is sparse.
    """

    name = "concat_groups"

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(self._join_rows, lambda value: value.to_sparse(2))

    def _join_rows(self, rows: Mapping[str, list[Tensor]], server: Mapping[str, Tensor]) -> State:
        sums, counts = (rows[name] for name in _MOMENTS)
        has_samples = torch.stack([value.to_dense() > 0 for value in counts])
        places = (has_samples.flatten(0, 1).cumsum(dim=0) - 1).view(has_samples.shape)  # among the groups with a class
        shape = (max(1, int(places.max()) + 1), *sums[0].shape[1:])
        moments = sums[0].new_zeros(shape, layout=torch.strided), counts[0].new_zeros(shape[:2], layout=torch.strided)
        for client_moments in zip(has_samples, places, sums, counts, strict=True):
            groups, classes = client_moments[0].nonzero(as_tuple=True)
            for result, value in zip(moments, client_moments[2:], strict=True):
                result[client_moments[1][groups, classes], classes] = value.to_dense()[groups, classes]
        return dict(zip(_MOMENTS, moments, strict=True))


@dataclass(frozen=True)
class RidgeStatistics:
    """Two entries, a and b, to which clients add.

    Args:
        names: Their names.
        reductions: How they come together, and the number of samples.
        add: Adds states and targets to a client's a and b.
        no_unlearning_reason: Why a client's part cannot be taken away again; None: it can.
        rank: How many rows of b are left in the end; None: b stays as it is.
    """

    names: tuple[str, str]
    reductions: ReductionRules
    add: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    no_unlearning_reason: str | None = None
    rank: int | None = None

    def allocate_rows(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        """With rows for all samples that the clients will see, so that none is cut off before the last."""
        return b if self.rank is None else F.pad(b, (0, 0, 0, max(part.num_samples for part in clients)))

    def finish(self, b: Tensor) -> Tensor:
        """What clients send of it."""
        return b if self.rank is None else torch.stack([leading_rows(rows, self.rank) for rows in b])


_NAMES = ("readout.A", "readout.B")
_ADDED: ReductionRules = dict.fromkeys((*_NAMES, "readout.n"), "sum")

SUMS = RidgeStatistics(_NAMES, _ADDED, accumulate)
"""A and B, whose sums over clients are those of all samples."""

_MOMENTS = ("moments.sums", "moments.counts")

MOMENTS = RidgeStatistics(
    _MOMENTS,
    {"moments.*": ConcatGroups(), "readout.n": "sum"},
    accumulate_groups,
    "shares moments, which the server weighs by those of all clients of a round",
)
"""Sums and numbers of each class's samples in random groups (STSA-E). The server holds those of a round at once.

A group with one sample of a class tells that sample.
"""


def low_rank(rank: int) -> RidgeStatistics:
    """A, and leading singular values and vectors of B, which the server merges (FedRAN)."""
    reason = (
        "keeps the `rank` leading directions of all clients' samples: what one has added cannot be told from the rest"
    )
    return RidgeStatistics(_NAMES, {**_ADDED, "readout.B": ConcatRows(rank)}, accumulate_rows, reason, rank)
