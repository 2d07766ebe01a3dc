"""Local training of many reservoirs at once: clients share the random weights, each has its own gain, bias and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.models.ridge import solve, square

if TYPE_CHECKING:
    from lightning_fcl.tasks.reservoir import ReservoirTask

Share = Literal["statistics", "weights"]
"""What a client sends."""

# Of all statistics of a cohort together, in bytes: where it is used up, fewer clients run side by side.
COHORT_BYTES = 128 * 2**20


class ReservoirTrainer:
    """Runs several clients' sequences through one reservoir: one product with its weights serves them all."""

    stacked = True
    optimizer = None

    def __init__(self, module: ReservoirTask, clients_at_once: int | None = None) -> None:
        self.module = module
        fitting = int(max(1, min(256, COHORT_BYTES // module.readout.B.nbytes)))
        self.clients_at_once = clients_at_once or fitting
        self.client_rounds: Sequence[ClientRound] = ()
        self.gain = self.bias = self.a = self.b = torch.empty(0)
        self.n: list[int] = []
        self._received: Sequence[State] = ()
        self._memories: Sequence[Sequence[Memory]] = ()

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        self.client_rounds, self._memories = clients, memories
        self._received = received = states
        if self.module.adapting:
            self.gain, self.bias = (
                torch.stack([state[f"reservoir.{name}"] for state in received]) for name in ("gain", "bias")
            )
        else:
            self.a, self.b = (self._own(name, received[0][f"readout.{name}"]) for name in ("A", "B"))
            self.n = [self._earlier(state) for state in received]

    def _own(self, name: str, server: Tensor) -> Tensor:
        started = torch.zeros(len(self._received), *server.shape, dtype=server.dtype, device=server.device)
        for row, state in enumerate(self._received):
            if self._earlier(state):
                started[row] = state[f"readout.{name}"]
        return started

    def _earlier(self, state: State) -> int:
        """Samples of a client's own earlier statistics, where these stay with the client and fit the reservoir."""
        same = self.module.share == "weights" and torch.equal(state["readout.tag"], self.module.readout.tag)
        return int(state["readout.n"]) if same else 0

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        assert weight is not None  # batches are stacked
        x, y = batch
        real = weight > 0
        if self.module.adapting:
            self._adapt(x, real)
        else:
            added = self.module.add(self.a, self.b, x[real], y[real], real.sum(dim=1).tolist())
            self.n = [before + new for before, new in zip(self.n, added, strict=True)]
        self.module.count_step()

    def _adapt(self, x: Tensor, real: Tensor) -> None:
        rule, reservoir = self.module.plasticity, self.module.reservoir
        if rule is None:
            return
        owner = real.nonzero()[:, 0]
        rows = reservoir.plasticity(x[real], rule.mu, rule.sigma, self.gain[owner], self.bias[owner])
        active = real.any(dim=1)
        counts = real.sum(dim=1, keepdim=True)[active]
        dg, db = (torch.zeros_like(self.gain).index_add_(0, owner, row)[active] / counts for row in rows)
        self.gain[active], self.bias[active] = rule.step(self.gain[active], self.bias[active], dg, db, reservoir.layers)

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> Trained:
        module, clients = self.module, len(self.client_rounds)
        states = {name: value.expand(clients, *value.shape) for name, value in entries(module).items()}
        if module.adapting:
            return Trained({**states, "reservoir.gain": self.gain, "reservoir.bias": self.bias}, self._memories)
        for client_round, n in zip(self.client_rounds, self.n, strict=True):
            if module.share == "statistics":
                module.warn_of_few(client_round.client, n)
        states |= {"readout.A": self.a, "readout.B": self.b, "readout.n": torch.tensor(self.n, device=self.a.device)}
        if module.share == "weights":
            solved = [solve(a, square(b, a.shape[1]), module.readout.beta) for a, b in zip(self.a, self.b, strict=True)]
            states["readout.weight"] = torch.stack(solved)
        return Trained(states, self._memories)
