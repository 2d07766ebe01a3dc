"""What a client adds up of its samples for a ridge regression, and how what clients send comes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import Rules
from lightning_fcl.federation.reductions import Accumulator, Gather, Reduction, SparseMean, State
from lightning_fcl.models.ridge import accumulate, accumulate_groups, accumulate_rows, leading


class Gathered(Reduction):
    """All uploads of a round, one behind the other; with a ``rank`` the leading rows of the server's and these.

    Zeros do not travel.
    """

    name = "gathered"
    down = False

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def start(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def wire_bytes(self, value: Tensor) -> int:
        return SparseMean().wire_bytes(value)

    def accumulator(self) -> Accumulator:
        return Gather(self._together)

    def _together(self, rows: Mapping[str, list[Tensor]], server: Mapping[str, Tensor]) -> State:
        if self.rank is None:
            return {name: torch.cat(given) for name, given in rows.items()}
        return {name: leading(torch.cat([server[name], *given]), self.rank) for name, given in rows.items()}


@dataclass(frozen=True)
class Statistics:
    """Two entries, a and b, to which clients add.

    Args:
        names: Their names.
        reductions: How they come together, and the number of samples.
        add: Adds states and targets to a client's a and b.
        why_not_unlearned: Why a client's part cannot be taken away again; None: it can.
        rank: How many rows of b are left in the end; None: b stays as it is.
    """

    names: tuple[str, str]
    reductions: Rules
    add: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    why_not_unlearned: str | None = None
    rank: int | None = None

    def begin(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        """With rows for all samples that the clients will see, so that none is cut off before the last."""
        return b if self.rank is None else F.pad(b, (0, 0, 0, max(part.samples for part in clients)))

    def finish(self, b: Tensor) -> Tensor:
        """What clients send of it."""
        return b if self.rank is None else torch.stack([leading(rows, self.rank) for rows in b])


_NAMES = ("readout.A", "readout.B")
_ADDED: Rules = dict.fromkeys((*_NAMES, "readout.n"), "sum")

SUMS = Statistics(_NAMES, _ADDED, accumulate)
"""A and B, whose sums over clients are those of all samples."""

MOMENTS = Statistics(
    ("moments.sums", "moments.counts"),
    {"moments.*": Gathered(), "readout.n": "sum"},
    accumulate_groups,
    "shares moments, which the server weighs by those of all clients of a round",
)
"""Sums and numbers of each class's samples in random groups (STSA-E). The server holds those of a round at once.

A group with one sample of a class tells that sample.
"""


def low_rank(rank: int) -> Statistics:
    """A, and leading singular values and vectors of B, which the server merges (FedRAN)."""
    reason = (
        "keeps the `rank` leading directions of all clients' samples: what one has added cannot be told from the rest"
    )
    return Statistics(_NAMES, {**_ADDED, "readout.B": Gathered(rank)}, accumulate_rows, reason, rank)
