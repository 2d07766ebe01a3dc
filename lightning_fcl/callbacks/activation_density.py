"""Density of the activations of the server's reservoir after each experience."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.trainer_access import move_batch, require_stream
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.methods.functional import evaluation_mode
from lightning_fcl.tasks.reservoir import ReservoirTask

# Number of test samples that run through the reservoir at once. This bounds the memory for the states.
_BATCH = 128
# Edges of the histogram bins.
_EDGES = np.linspace(-1, 1, 101)


class ActivationDensity(Callback):
    """Callback that records the density of the server's reservoir states on the test samples after each experience.

    The states are between -1 and 1, and are pooled over units, time steps and samples. ``record`` contains densities
    over all test samples, and over the samples of each group (a class or a domain). If the dataset assigns samples to
    clients, ``record`` also contains densities over the test samples of each client, under the key ``"owners"``.
    These densities correspond to figures 3 and 5 of De Caro et al. (2023), "Decentralized plasticity in reservoir
    dynamical networks for pervasive environments".

    Raises:
        ValueError: If the module is not a `ReservoirTask`, or the stream has no test samples.

    Example:
        >>> ActivationDensity().record
        {}
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, ReservoirTask):
            raise InvalidValueError(
                f"Expected a `ReservoirTask` for `ActivationDensity`, but got a `{type(pl_module).__name__}`.",
                hint="Use a `ReservoirClassifier`, or remove the callback.",
                argument="module",
                value=type(pl_module).__name__,
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream = require_stream(trainer)
        require_federation(trainer, "ActivationDensity", "it has no rounds")
        if not len(stream.plan.test):
            raise MissingValueError(
                "Expected test samples for `ActivationDensity`, but the stream has no test samples.",
                hint="Set `split=Split(test=0.2)` of the stream, or remove the callback.",
                argument="test",
            )
        if not self.record or trainer.current_epoch == 0:
            self.record = {"edges": _EDGES.tolist(), "experiences": []}

    @torch.no_grad()
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream, round_idx = require_stream(trainer), trainer.current_epoch
        plan = stream.plan
        current, *next_experiences = (
            max(numbers[r] for numbers in plan.experiences.values())
            for r in range(round_idx, min(round_idx + 2, plan.num_rounds))
        )
        if next_experiences == [current] or not isinstance(pl_module, ReservoirTask):
            return
        test, names = plan.test, plan.group_names(stream.classes)
        owned = np.zeros(len(test), dtype=np.int64)
        owners: list[str] = []
        if stream.samples.client_ids is not None:
            ids, owned = np.unique(stream.samples.client_ids[test], return_inverse=True)
            owners = [str(owner) for owner in ids]
        cells = plan.groups[test] * max(1, len(owners)) + owned
        precision, bins = trainer.precision_plugin, len(_EDGES) - 1
        cell = torch.from_numpy(cells).to(pl_module.device)
        counts = torch.zeros(len(names) * max(1, len(owners)) * bins, dtype=torch.int64, device=pl_module.device)
        # The code of a dataset may draw random numbers. They must not change the training.
        with isolate_rng(), evaluation_mode(pl_module), precision.forward_context():
            for start in range(0, len(test), _BATCH):
                x = move_batch(trainer, stream.samples.get(test[start : start + _BATCH], "test"))[0]
                first = cell[None, start : start + _BATCH, None] * bins
                for states in pl_module.reservoir.iter_states(precision.convert_input(x)):
                    counts += torch.bincount((first + bin_indices(states, bins)).flatten(), minlength=len(counts))
        # Shape (group, owner, bin).
        table = counts.view(len(names), -1, bins).cpu().numpy()
        of_groups, of_owners = table.sum(axis=1), table.sum(axis=0)
        densities = {
            "experience": current,
            "all": _density(of_groups.sum(axis=0)),
            "groups": {name: _density(of) for name, of in zip(names, of_groups, strict=True) if of.any()},
            "owners": {name: _density(of) for name, of in zip(owners, of_owners, strict=False)},
        }
        self.record["experiences"].append(densities)

    def state_dict(self) -> dict[str, Any]:
        return {"record": self.record}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.record = state_dict["record"]


def _density(counts: IntArray) -> list[float]:
    density: list[float] = (counts / (counts.sum() * np.diff(_EDGES))).tolist()
    return density


def bin_indices(states: Tensor, bins: int) -> Tensor:
    """Return the index of each state's bin, from 0. The bins are equal parts of [-1, 1].

    As in `numpy.histogram`, the value 1 is in the last bin.
    """
    # Compute in double precision, so that rounding cannot move a state to a different bin.
    return states.double().add_(1).mul_(bins / 2).long().clamp_(0, bins - 1)
