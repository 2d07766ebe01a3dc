"""How the activations of the server's reservoir are distributed, experience after experience."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.attached import need_stream, transfer_batch
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.methods.functional import evaluating
from lightning_fcl.tasks.reservoir import ReservoirTask

# Test samples that run through the reservoir together: the states of a block of theirs are all that is ever held.
_BATCH = 128
_EDGES = np.linspace(-1, 1, 101)  # of the bins


class ActivationDensity(Callback):
    """After an experience's last round: takes the density of the server's reservoir on the stream's test samples.

    The states, which lie between -1 and 1, are pooled over units, steps and samples: over all test samples, over those
    of each group (a class, or a domain) and over those of each owner (the clients that join later, where the stream's
    ``test`` names them). ``record`` holds the densities, as in figures 3 and 5 of De Caro et al. 2023,
    "Decentralized plasticity in reservoir dynamical networks for pervasive environments".

    Raises:
        ValueError: If the module has no reservoir, or there is no stream with test samples.

    Example:
        >>> ActivationDensity().record
        {}
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, ReservoirTask):
            raise ValueError(
                "Expected a module whose `reservoir` is an `EchoStateNetwork` for `ActivationDensity` but got a "
                f"`{type(pl_module).__name__}`. Take a `ReservoirClassifier`, or leave the callback out."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream = need_stream(trainer)
        need_federation(trainer, "ActivationDensity", "it has no rounds")
        if not len(stream.plan.test):
            raise ValueError("Expected the stream's `test` to be above 0 but got no test samples to run on.")
        if not self.record or trainer.current_epoch == 0:
            self.record = {"edges": _EDGES.tolist(), "experiences": []}

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plan, round = need_stream(trainer).plan, trainer.current_epoch
        current, *after = (
            max(numbers[r] for numbers in plan.experiences.values()) for r in range(round, min(round + 2, plan.rounds))
        )
        if after != [current] and isinstance(pl_module, ReservoirTask):
            self.record["experiences"].append({"experience": current, **self._densities(trainer, pl_module)})

    def _densities(self, trainer: L.Trainer, module: ReservoirTask) -> dict[str, Any]:
        stream = need_stream(trainer)
        test, names = stream.plan.test, stream.plan.group_names(stream.classes)
        owned = np.zeros(len(test), dtype=np.int64)
        owners: list[str] = []
        if stream.samples.owner is not None:
            ids, owned = np.unique(stream.samples.owner[test], return_inverse=True)
            owners = [str(owner) for owner in ids]
        cells = stream.plan.groups[test] * max(1, len(owners)) + owned
        counts = self._counts(trainer, module, cells, len(names) * max(1, len(owners)))
        table = counts.reshape(len(names), -1, counts.shape[-1])  # group, owner, bin
        of_groups, of_owners = table.sum(axis=1), table.sum(axis=0)
        return {
            "all": _density(of_groups.sum(axis=0)),
            "groups": {name: _density(of) for name, of in zip(names, of_groups, strict=True) if of.any()},
            "owners": {name: _density(of) for name, of in zip(owners, of_owners, strict=False)},
        }

    @torch.no_grad()
    def _counts(self, trainer: L.Trainer, module: ReservoirTask, cells: IntArray, number: int) -> IntArray:
        stream = need_stream(trainer)
        precision, bins = trainer.precision_plugin, len(_EDGES) - 1
        counts = torch.zeros(number * bins, dtype=torch.int64, device=module.device)
        test, cell = stream.plan.test, torch.from_numpy(cells).to(module.device)
        # A data set's own code may draw random numbers, which training must not notice.
        with isolate_rng(), evaluating(module), precision.forward_context():
            for start in range(0, len(test), _BATCH):
                x = transfer_batch(trainer, stream.samples.take(test[start : start + _BATCH], "test"))[0]
                first = cell[None, start : start + _BATCH, None] * bins
                for states in module.reservoir.blocks(precision.convert_input(x)):
                    counts += torch.bincount((first + _bin_of(states, bins)).flatten(), minlength=len(counts))
        return counts.view(number, bins).cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"record": self.record}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.record = state_dict["record"]


def _density(counts: IntArray) -> list[float]:
    density: list[float] = (counts / (counts.sum() * np.diff(_EDGES))).tolist()
    return density


def _bin_of(states: Tensor, bins: int) -> Tensor:
    """Which of ``bins`` equal parts of [-1, 1] a state lies in, from 0; as in `numpy.histogram`, 1 is in the last."""
    # In double precision no state crosses an edge by rounding.
    return states.double().add_(1).mul_(bins / 2).long().clamp_(0, bins - 1)
