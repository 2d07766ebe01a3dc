"""SI: a penalty on parameters by what each has contributed to the fall of the loss, taken while the client trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.importance import Consolidation
from lightning_fcl.methods.step import stepped_by


@dataclass(eq=False)
class SI(Consolidation):
    """Every step: holds what has made the loss fall in the client's earlier experiences (Zenke et al. 2017).

    ``task loss + strength / 2 * sum_i Omega_i * (theta_i - theta*_i)^2``, as in `EWC`; the paper's equation 4 has no
    1 / 2: its c is ``strength / 2``. Each step adds ``-g_i * (change of theta_i)`` to omega_i, g being the gradient of
    the loss without this penalty, before it is clipped. When an experience ends, Omega_i grows by ``omega_i / (D_i^2 +
    damping)`` (equation 5), at least by 0; D_i is how far the client's own steps of the experience have moved theta_i,
    not the server. Of a quadratic loss, Omega_i tends to half its curvature.

    A client keeps four numbers for each parameter, and sends what FedAvg sends. Clients train one at a time.

    Args:
        strength: Weight of the penalty, at least 0; 0 is fine-tuning.
        decay: What remains of the earlier experiences' Omega when an experience ends, 0 to 1; 1 sums them.
        normalize: Whether Omega is divided by its greatest entry, with what this promises: see `EWC`.
        damping: The paper's xi, above 0: keeps Omega of parameters small that have hardly moved.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> SI(strength=0.2).damping
        0.1
    """

    needs: ClassVar[Needs] = Needs()
    vectorizable: ClassVar[bool] = False

    strength: float = argument(0.5, at_least, 0)
    damping: float = argument(0.1, above, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: dict[str, tuple[Tensor, Tensor]] = {}  # parameters and gradients before the client's last step

    def on_download(self, client: Client) -> Memory:
        memory = super().on_download(client)
        for name, value in section(memory, "center").items():
            for key in (f"fall.{name}", f"moved.{name}"):
                memory[key] = memory[key].clone() if key in memory else torch.zeros_like(value)
        return memory

    def begin(self, client: Client) -> None:
        self._last = {}

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        client, memory = self.client, self.client.memory
        self._note_step(client, dict(pl_module.named_parameters()))
        weight = self.strength * memory.get("scale", 1.0)
        for name, p in stepped_by(optimizer, pl_module).items():
            if client.active and p.grad is not None and f"fall.{name}" in memory:
                of_penalty = weight * memory[f"importance.{name}"] * (p - memory[f"center.{name}"])
                self._last[name] = p.clone(), p.grad - of_penalty

    def _note_step(self, client: Client, now: Mapping[str, Tensor]) -> None:
        """Note what the last step has done, once."""
        for name, (before, gradient) in self._last.items():
            change = now[name] - before
            client.memory[f"fall.{name}"].sub_(gradient * change)
            client.memory[f"moved.{name}"].add_(change)
        self._last = {}

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        self._note_step(client, own)
        return super().end_round(client, own, data)

    def importance(self, client: Client, own: State, data: Batch, names: Iterable[str]) -> State:
        fall, moved = section(client.memory, "fall"), section(client.memory, "moved")
        return {name: fall[name].clamp(min=0) / (moved[name].square() + self.damping) for name in names}
