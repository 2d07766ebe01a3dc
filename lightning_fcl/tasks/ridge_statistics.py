"""What a client adds up of its samples for a ridge regression, and how what clients send comes together.

Each kind has the ``names`` of its two entries, a and b, with their ``reductions``. Clients `begin` with what they may
have kept unsent, `add` samples, and `finish` with what they send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import Rules
from lightning_fcl.federation.reductions import Accumulator, Gather, Reduction, SparseMean, State
from lightning_fcl.models.ridge import accumulate, accumulate_groups, accumulate_rows, leading


class Sums:
    """A and B: their sums over clients are those of all samples, and what a client has added can be taken away."""

    names = ("readout.A", "readout.B")
    reductions: Rules = dict.fromkeys((*names, "readout.n"), "sum")
    why_not_unlearned: str | None = None

    def begin(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        """With room for what the clients will see, shape (clients, ...)."""
        return b

    def add(self, a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
        accumulate(a, b, states, targets)

    def finish(self, b: Tensor) -> Tensor:
        return b


class LowRank:
    """A, and of B's factor the leading singular values and vectors, which the server merges (FedRAN)."""

    names = Sums.names
    why_not_unlearned = (
        "keeps the `rank` leading directions of all clients' samples: what one has added cannot be told from the rest"
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reductions: Rules = {**Sums.reductions, "readout.B": Gathered(rank)}

    def begin(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        most = max(part.samples for part in clients)
        return F.pad(b, (0, 0, 0, most))  # so that nothing is cut off before the last sample

    def add(self, a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
        accumulate_rows(a, b, states, targets)

    def finish(self, b: Tensor) -> Tensor:
        return torch.stack([leading(rows, self.rank) for rows in b])


class Moments:
    """Sums and numbers of each class's samples in random groups, by which the server estimates B (STSA-E).

    It holds those of all clients of a round at once. A group with one sample of a class tells that sample.
    """

    names = ("moments.sums", "moments.counts")
    why_not_unlearned = "shares moments, which the server weighs by those of all clients of a round"

    def __init__(self) -> None:
        self.reductions: Rules = {"moments.*": Gathered(), "readout.n": "sum"}

    def begin(self, b: Tensor, clients: Sequence[ClientRound]) -> Tensor:
        return b

    def add(self, a: Tensor, b: Tensor, states: Tensor, targets: Tensor) -> None:
        accumulate_groups(a, b, states, targets)

    def finish(self, b: Tensor) -> Tensor:
        return b


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
