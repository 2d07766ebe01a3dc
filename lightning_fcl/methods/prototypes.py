"""Class means that clients add up: one sum of features and one count for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.exact import ExactSums
from lightning_fcl.federation.protocol import EmbedsInputs, HasClasses
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.reductions import Accumulator, SparseMean, Sum


class ClassSums(SparseMean):
    """The reduction of sums by class: those of a round's clients are added up, in place of the server's.

    Entries have the shape (classes, 1 + features): a count, and a sum of features. Their quotient is the mean over the
    samples of all clients, whatever the clients weigh elsewhere. A class that no client of the round has keeps the
    server's row; nothing is added up over rounds. Zeros do not travel.
    """

    name = "class_sums"

    def accumulator(self) -> Accumulator:
        return _Sums()


class SumOfSome(Sum):
    """The reduction ``sum`` of what is often nothing: a client with zeros alone sends no byte."""

    name = "sum_of_some"

    def wire_bytes(self, value: Tensor) -> int:
        return value.nbytes if bool(value.any()) else 0


class _Sums:
    def __init__(self) -> None:
        self._sums = ExactSums()

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values)

    def combine(self, ranks: Ranks) -> None:
        self._sums.combine(ranks)

    def result(self, server: Mapping[str, Tensor]) -> State:
        totals = {
            name: exact.total(server[name].dtype).to(server[name].device) for name, exact in self._sums.by_name.items()
        }
        return {name: torch.where(total[:, :1] > 0, total, server[name]) for name, total in totals.items()}


def class_sums(module: L.LightningModule, features: Tensor, y: Tensor) -> Tensor:
    """The count and the sum of the features of each class, shape (classes, 1 + features)."""
    counted = torch.cat([torch.ones_like(features[:, :1]), features], dim=1)
    return no_sums(module).to(counted).index_add_(0, y.to(counted.device), counted)


def no_sums(module: L.LightningModule) -> Tensor:
    """The sums of no samples, shape (classes, 1 + features)."""
    if not (isinstance(module, HasClasses) and isinstance(module, EmbedsInputs)):
        raise ValueError(
            f"Expected a module with `num_classes`, `embed(x)` and `features`, the number of its features, but got a "
            f"`{type(module).__name__}`. Use a `Classifier`, or define them beside `speaks_lightning_fcl = True`."
        )
    return next(module.parameters()).new_zeros(module.num_classes, 1 + module.features)


def class_means(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each class, shape (classes, features), and which classes have one, shape (classes,)."""
    return sums[:, 1:] / sums[:, :1].clamp(min=1), sums[:, 0] > 0


def nearest_mean(features: Tensor, means: Tensor, known: Tensor, output: Tensor) -> Tensor:
    """Scores of classes: minus the distance from each mean, -inf for unknown ones; ``output`` where none is known."""
    if not known.any():
        return output
    # Not by products of matrices, whose rounding depends on the number of samples.
    distance = torch.cdist(features.to(means), means, compute_mode="donot_use_mm_for_euclid_dist")
    return -distance.masked_fill(~known, torch.inf)
