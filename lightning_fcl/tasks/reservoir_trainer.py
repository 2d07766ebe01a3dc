"""Local training of many reservoirs at once: clients share the random weights, each has its own gain, bias and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.tasks.ridge_trainer import RidgeTrainer, with_rows

if TYPE_CHECKING:
    from lightning_fcl.tasks.reservoir import ReservoirTask


class ReservoirTrainer(RidgeTrainer):
    """A `RidgeTrainer` that adapts reservoirs in the rounds before their readouts are learnt."""

    def __init__(self, module: ReservoirTask, cohort_size: int | Literal["auto"] = "auto") -> None:
        super().__init__(module, cohort_size)
        self._task = module
        self._gain = self._bias = torch.empty(0)

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        if not self._task.adapting:
            super().begin(clients, states, memories, optimizers)
            return
        self.client_rounds, self.memories = clients, memories
        self._gain, self._bias = (
            torch.stack([state[f"reservoir.{name}"] for state in states]) for name in ("gain", "bias")
        )

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        if not self._task.adapting:
            super().training_step(batch, batch_idx, weight)
            return
        assert weight is not None  # batches are stacked
        self._adapt(batch[0], weight > 0)
        self._task.count_step()

    def _adapt(self, x: Tensor, real: Tensor) -> None:
        rule, reservoir = self._task.plasticity, self._task.reservoir
        if rule is None:
            return
        owner = real.nonzero()[:, 0]
        rows = reservoir.plasticity(x[real], rule.mu, rule.sigma, self._gain[owner], self._bias[owner])
        active = real.any(dim=1)
        counts = real.sum(dim=1, keepdim=True)[active]
        dg, db = (torch.zeros_like(self._gain).index_add_(0, owner, row)[active] / counts for row in rows)
        moved = rule.step(self._gain[active], self._bias[active], dg, db, reservoir.layers)
        self._gain[active], self._bias[active] = moved

    def finish(self) -> Trained:
        if not self._task.adapting:
            return super().finish()
        states = with_rows(self._task, len(self.client_rounds))
        return Trained({**states, "reservoir.gain": self._gain, "reservoir.bias": self._bias}, self.memories)
