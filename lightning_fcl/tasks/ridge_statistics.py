"""Targets of a ridge regression, and the statistics of inputs and targets that clients upload."""

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
    """One-hot targets: 1 for a sample's class, and 0 or -1 for other classes. The largest output is the prediction."""

    quantity = "accuracy"

    def __init__(self, num_classes: int, signed: bool = False) -> None:
        at_least(1, num_classes=num_classes)
        self.num_outputs = num_classes
        self.signed = signed

    def encode(self, y: Tensor) -> Tensor:
        """Return the targets of labels: (batch, outputs), or (batch, time, outputs) with a label for every step."""
        if y.is_floating_point():
            raise InvalidValueError(
                f"Expected whole numbers as labels, but got {y.dtype}.",
                hint="Use `y.long()` for labels, or a regression task for numbers.",
                argument="y",
                value=y.dtype,
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_outputs:
            wrong = int(y[(y < 0) | (y >= self.num_outputs)][0])
            raise InvalidValueError(
                f"Expected labels between 0 and {self.num_outputs - 1}, but got {wrong}.",
                hint="Number the labels from 0, and set `num_classes` to the data's number of classes.",
                argument="num_classes",
                value=wrong,
            )
        targets = F.one_hot(y.long(), self.num_outputs).double()
        return targets * 2 - 1 if self.signed else targets

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions of each readout, shape (readouts,). Higher is better.

        Args:
            outputs: Outputs of the readouts, shape (..., readouts, outputs).
            targets: Targets, shape (..., outputs).
        """
        right = outputs.argmax(dim=-1) == targets.argmax(dim=-1)[..., None]
        return right.double().flatten(0, -2).sum(dim=0)

    def metric(self) -> Metric:
        return MulticlassAccuracy(self.num_outputs, average="micro")

    def to_predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes for the metric, both as vectors, from tensors of shape (..., outputs)."""
        return outputs.argmax(dim=-1).flatten(), targets.argmax(dim=-1).flatten()


class RealTargets:
    """Targets that are real numbers, evaluated by the squared error."""

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
                "Expected finite targets, but got NaN or infinite values.",
                hint="Correct or drop the sequences with such targets.",
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
    """A reduction that aggregates all uploads of a round at once. Zeros are not uploaded."""

    is_downloaded = False

    def initial_value(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        return pack_nonzero(value)

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        return unpack_nonzero(packed, reference)


class ConcatRows(ConcatReduction):
    """A reduction that stacks the rows of the server and of all uploads, and reduces the stack to ``rank`` rows.

    The result contains the leading singular values of the stack times their right singular vectors.
    """

    name = "concat_rows"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(self._join_rows, nonzero_rows)

    def _join_rows(self, rows: Mapping[str, list[Tensor]], server: Mapping[str, Tensor]) -> State:
        return {name: leading_rows(torch.cat([server[name], *given]), self.rank) for name, given in rows.items()}


class ConcatGroups(ConcatReduction):
    """A reduction that joins the groups of all clients. A group contains a sum of features and a count for each class.

    Groups without samples are left out. A client often has samples of few classes in few groups. Therefore, uploads are
    kept as sparse tensors until all uploads of the round are aggregated.
    """

    name = "concat_groups"

    def make_accumulator(self) -> Accumulator:
        return GatheringAccumulator(self._join_rows, lambda value: value.to_sparse(2))

    def _join_rows(self, rows: Mapping[str, list[Tensor]], server: Mapping[str, Tensor]) -> State:
        sums, counts = (rows[name] for name in _MOMENTS)
        has_samples = torch.stack([value.to_dense() > 0 for value in counts])
        # For each class, the position of each group among the groups with samples of this class.
        places = (has_samples.flatten(0, 1).cumsum(dim=0) - 1).view(has_samples.shape)
        shape = (max(1, int(places.max()) + 1), *sums[0].shape[1:])
        moments = sums[0].new_zeros(shape, layout=torch.strided), counts[0].new_zeros(shape[:2], layout=torch.strided)
        for client_moments in zip(has_samples, places, sums, counts, strict=True):
            groups, classes = client_moments[0].nonzero(as_tuple=True)
            for result, value in zip(moments, client_moments[2:], strict=True):
                result[client_moments[1][groups, classes], classes] = value.to_dense()[groups, classes]
        return dict(zip(_MOMENTS, moments, strict=True))


@dataclass(frozen=True)
class RidgeStatistics:
    """Two statistics, a and b, that clients compute from their samples.

    Args:
        names: Names of a and b in the state.
        reductions: Reductions of a, b and the number of samples.
        add: Function that adds inputs of the readout and their targets to a client's a and b.
        no_unlearning_reason: Reason why the statistics of a client cannot be subtracted. None: the statistics can be
            subtracted.
        rank: Number of rows of b in an upload, or None for all rows.
    """

    names: tuple[str, str]
    reductions: ReductionRules
    add: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    no_unlearning_reason: str | None = None
    rank: int | None = None

    def allocate_rows(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        """Return b with additional rows of zeros, one for each sample of the client with the most samples.

        With these rows, b does not have to be reduced to its leading rows during training. Without ``rank``, b is
        returned unchanged.
        """
        return b if self.rank is None else F.pad(b, (0, 0, 0, max(part.num_samples for part in clients)))

    def finish(self, b: Tensor) -> Tensor:
        """Return b in the form that clients upload, reduced to ``rank`` rows if ``rank`` is set."""
        return b if self.rank is None else torch.stack([leading_rows(rows, self.rank) for rows in b])


_NAMES = ("readout.A", "readout.B")
_ADDED: ReductionRules = dict.fromkeys((*_NAMES, "readout.n"), "sum")

SUMS = RidgeStatistics(_NAMES, _ADDED, accumulate)
"""The statistics A and B. Their sums over clients equal A and B of all samples."""

_MOMENTS = ("moments.sums", "moments.counts")

MOMENTS = RidgeStatistics(
    _MOMENTS,
    {"moments.*": ConcatGroups(), "readout.n": "sum"},
    accumulate_groups,
    "uploads moments, which the server weighs with the moments of all clients of a round",
)
"""For each class in each random group, the sum of features and the number of samples (STSA-E).

The server needs all uploads of a round at once.

A group with a single sample of a class reveals the features of this sample.
"""


def low_rank(rank: int) -> RidgeStatistics:
    """Return the statistics A and, instead of B, leading singular vectors that the server merges (FedRAN).

    The vectors are the right singular vectors of the features, multiplied by their singular values.
    """
    reason = (
        "uploads only the `rank` leading directions of B: a client cannot be removed from the directions of all clients"
    )
    return RidgeStatistics(_NAMES, {**_ADDED, "readout.B": ConcatRows(rank)}, accumulate_rows, reason, rank)
