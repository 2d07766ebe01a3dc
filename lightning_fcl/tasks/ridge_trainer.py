"""Local training of many readouts at once: clients share the body, each has sums, gain and bias of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.models.ridge import add_to_diagonal, solve, square

if TYPE_CHECKING:
    from lightning_fcl.tasks.reservoir import ReservoirTask
    from lightning_fcl.tasks.ridge import RidgeTask

log = logging.getLogger(__name__)

Share = Literal["statistics", "weights"]
"""What a client of any ridge regression may send."""

# Of all statistics of a cohort together, in bytes: where it is used up, fewer clients run side by side.
COHORT_BYTES = 128 * 2**20


class PlasticityRule(Protocol):
    """How gain and bias adapt: `lightning_fcl.callbacks.IntrinsicPlasticity`."""

    mu: float
    sigma: float

    def step(self, gain: Tensor, bias: Tensor, dg: Tensor, db: Tensor, layers: int = 1) -> tuple[Tensor, Tensor]: ...


class RidgeTrainer:
    """Runs several clients' samples through one body, and adds them to each one's sums."""

    stacked = True
    optimizer = None

    def __init__(self, module: RidgeTask, cohort_size: int | Literal["auto"] = "auto") -> None:
        self.module = module
        fitting = int(max(1, min(256, COHORT_BYTES // module.readout.B.nbytes)))
        self.clients_at_once = fitting if cohort_size == "auto" else cohort_size
        self.client_rounds: Sequence[ClientRound] = ()
        self.memories: Sequence[Sequence[Memory]] = ()
        self._a = self._b = torch.empty(0)
        self._room: dict[str, Tensor] = {}  # for one cohort's after the other: new memory would cost more than the work
        self._n: list[int] = []
        self._warned: set[str] = set()

    def begin(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        memories: Sequence[Sequence[Memory]],
        optimizers: Sequence[Memory],
    ) -> None:
        self.client_rounds, self.memories = clients, memories
        statistics = self.module.statistics
        self._a, b = (self._stacked([self._begun(state, name) for state in states], name) for name in statistics.names)
        self._b = statistics.begin(b, clients)
        self._n = [int(self._begun(state, "readout.n")) for state in states]
        if self.module.gamma:  # what could not be sent holds it
            for row, state in zip(self._b, states, strict=True):
                add_to_diagonal(row, self._a.shape[-1], -self.module.gamma * int(state["regularised"]))

    def _begun(self, state: State, name: str) -> Tensor:
        """What a client's sums begin with: nothing, or what has stayed with it, if that is of the same body."""
        same = torch.equal(state["readout.tag"], self.module.readout.tag)
        return state[name] if same else torch.zeros_like(state[name])

    def _stacked(self, rows: list[Tensor], name: str) -> Tensor:
        room = self._room.get(name)
        if room is None or len(room) < len(rows) or room.device != rows[0].device:
            room = self._room[name] = torch.stack(rows)
            return room
        return torch.stack(rows, out=room[: len(rows)])

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        assert weight is not None  # batches are stacked
        (x, y), real = batch, weight > 0
        for row, new in enumerate(self.module.add(self._a, self._b, x[real], y[real], real.sum(dim=1).tolist())):
            self._n[row] += new
        self.module.count_step()

    def optimizer_step(self, step: Callable[[], object], active: int) -> object:
        return step()

    def finish(self) -> Trained:
        module = self.module
        for part, n in zip(self.client_rounds, self._n, strict=True):
            if module.share != "weights" and n < module.min_samples and part.client not in self._warned:
                self._warned.add(part.client)
                log.warning(
                    "The statistics of client %s are of %d samples, below `min_samples`=%d: they can reveal its data. "
                    "Wait for more, or use secure aggregation.",
                    part.client,
                    n,
                    module.min_samples,
                )
        a_name, b_name = module.statistics.names
        changed = {
            a_name: self._a,
            b_name: module.statistics.finish(self._b),
            "readout.n": torch.tensor(self._n, device=self._a.device),
        }
        if module.local_models:
            beta, each = module.gamma or module.readout.beta, zip(self._a, self._b, strict=True)
            changed["readout.weight"] = torch.stack([own_solution(a, b, beta) for a, b in each])
        if module.gamma:
            for row in self._b:
                add_to_diagonal(row, self._a.shape[-1], module.gamma)
            changed["regularised"] = torch.ones(len(self._b), dtype=torch.long, device=self._a.device)
        return Trained(with_rows(module, len(self.client_rounds)) | changed, self.memories)


def own_solution(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """A client's own weights, NaN if its statistics are not finite: it is left out, by name."""
    if torch.isfinite(a).all() and torch.isfinite(b).all():
        return solve(a, square(b, a.shape[1]), beta)
    return torch.full_like(a, torch.nan)


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
        self._task.count_step()
        rule, reservoir, real = self._task.plasticity, self._task.reservoir, weight > 0
        if rule is None:
            return
        owner = real.nonzero()[:, 0]
        rows = reservoir.plasticity(batch[0][real], rule.mu, rule.sigma, self._gain[owner], self._bias[owner])
        gain, bias = self._gain[: len(real)], self._bias[: len(real)]
        dg, db = (torch.zeros_like(gain).index_add_(0, owner, row) / real.sum(dim=1, keepdim=True) for row in rows)
        gain[:], bias[:] = rule.step(gain, bias, dg, db, reservoir.layers)

    def finish(self) -> Trained:
        if not self._task.adapting:
            return super().finish()
        states = with_rows(self._task, len(self.client_rounds))
        return Trained({**states, "reservoir.gain": self._gain, "reservoir.bias": self._bias}, self.memories)


def with_rows(module: RidgeTask, clients: int) -> State:
    """A module's state, every entry of shape (clients, ...)."""
    return {name: value.expand(clients, *value.shape) for name, value in entries(module).items()}
