"""APFL: a personal model beside the shared one, and a learnt weight that mixes the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_fcl.errors import argument, at_least, between
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.functional import GradientOf
from lightning_fcl.methods.personal import PersonalModel
from lightning_fcl.methods.projection import flatten


@dataclass(eq=False)
class APFL(PersonalModel):
    """Every step: a personal model ``v`` and its weight ``alpha`` learn beside the shared ``w`` (Deng et al. 2020).

    ``w`` travels and trains as without it. With ``v_bar = alpha v + (1 - alpha) w`` and g the gradient of the task
    loss at ``v_bar`` on the step's batch, remembered samples included, ``v`` takes a step with ``alpha g`` and
    ``alpha`` one with ``<v - w, g>`` (Algorithm 1 and eq. 10); ``alpha`` is clipped to [0, 1]. A client predicts with
    ``v_bar`` of its ``v`` and the server's ``w``: `personalize`, which ``ContinualMetrics(when="aggregated")`` tests.
    ``v`` holds trainable parameters; buffers are those of ``w``.

    ``v`` has an optimizer like that of ``w``, while the paper has SGD. Clients train one at a time; a step costs two
    forward and backward passes in place of one.

    Args:
        alpha0: What ``alpha`` begins with, from 0 to 1.
        alpha_lr: Step size of ``alpha``; None: the optimizer's learning rate, as in the paper; 0: ``alpha`` is fixed.

    Raises:
        ValueError: If an argument is out of range, the Trainer is no federation's, or the module does not state its
            loss apart.

    Example:
        >>> APFL(alpha0=0.5).alpha0
        0.5
    """

    needs: ClassVar[Needs] = Needs(
        labels=True, loss=True, federation="with a single client there is no shared model to mix with. Remove `APFL`"
    )

    alpha0: float = argument(0.5, between, 0, 1)
    alpha_lr: float | None = argument(None, at_least, 0)

    def on_download(self, client: Client) -> Memory:
        memory = super().on_download(client)
        alpha = memory.get("alpha", torch.tensor(float(self.alpha0)))
        return {**memory, "alpha": alpha.clone()} if client.active else memory

    def personal_gradient(
        self, client: Client, own: State, shared: Mapping[str, nn.Parameter], gradient_of: GradientOf
    ) -> Tensor:
        alpha = client.memory["alpha"]
        before = alpha.clone()
        gradient = gradient_of(*client.batch, mix(own, shared, alpha))
        if torch.isfinite(gradient.sum()):
            towards = flatten(own) - flatten(shared).detach()
            rate = client.module.trainer.optimizers[0].param_groups[0]["lr"] if self.alpha_lr is None else self.alpha_lr
            alpha.sub_(rate * (towards @ gradient)).clamp_(0, 1)
        return before * gradient

    def personalize(self, client: Client, state: State) -> State:
        own = {name: value.to(state[name].device) for name, value in section(client.memory, "v").items()}
        return {**state, **mix(own, state, client.memory["alpha"])} if own else state


@torch.no_grad()
def mix(personal: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: Tensor) -> State:
    """``alpha v + (1 - alpha) w`` of the entries of ``personalize``; exactly w at 0 and v at 1."""
    return {name: torch.lerp(shared[name], v, alpha.to(v.device, v.dtype)) for name, v in personal.items()}
