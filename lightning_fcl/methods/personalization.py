"""APFL and Ditto: a personal model beside the shared one, mixed with it by a learnt weight, or drawn to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.server_optimizer import (
    group_values,
    load_optimizer_state,
    optimizer_state,
    set_group_values,
    with_parameters,
)
from lightning_fcl.methods.context import Client, strip_prefix, with_prefix
from lightning_fcl.methods.functional import make_gradient_fn, optimized_parameters, step_along, trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.projection import flatten
from lightning_fcl.validation import at_least, between, validated


@dataclass(eq=False)
class APFL(Method):
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

    vectorizable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        labels=True,
        sample_loss=True,
        federation_reason="with a single client there is no shared model to mix with. Remove `APFL`",
    )

    alpha0: float = validated(0.5, between, 0, 1)
    alpha_lr: float | None = validated(None, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trainable: list[str] = []
        self._personal: dict[str, nn.Parameter] = {}  # of the client that trains now
        self._optimizer: Optimizer | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise InvalidValueError(
                f"Expected `accumulate_grad_batches=1` for `{type(self).__name__}`, whose personal model steps with "
                f"each batch, but got {trainer.accumulate_grad_batches}.",
                hint="Raise the stream's `batch_size` instead.",
                argument="accumulate_grad_batches",
                value=trainer.accumulate_grad_batches,
            )
        self._trainable = [*trainable_parameters(pl_module)]

    def prepare_client_state(self, client: Client) -> StateSection:
        if not client.is_active:
            return client.method_state
        personal_state = {**client.received_state, **strip_prefix(client.method_state, "v")}
        personal_entries = with_prefix({name: personal_state[name] for name in self._trainable}, "v")
        alpha = client.method_state.get("alpha", torch.tensor(float(self.alpha0)))
        return {**client.method_state, **personal_entries, "alpha": alpha.clone()}

    def start_client(self, client: Client) -> None:
        self._personal, self._optimizer = {}, None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        client, shared = self.client, optimized_parameters(optimizer, pl_module)
        if not (client.is_active and shared):
            return
        if self._optimizer is None:
            self._optimizer = self._begun(client, optimizer)
        personal_params = {name: self._personal[name].detach() for name in shared}
        alpha = client.method_state["alpha"]
        gradient = make_gradient_fn(pl_module, shared)(*client.batch, interpolate(personal_params, shared, alpha))
        if not torch.isfinite(gradient.sum()):
            return  # what a client keeps must stay of use; one that diverges is the federation's to refuse
        towards = flatten(personal_params) - flatten(shared).detach()
        set_group_values(self._optimizer, group_values(optimizer))  # a schedule's
        direction = alpha * gradient + self.extra_gradient(client, personal_params)
        step_along(pl_module, self._optimizer, {name: self._personal[name] for name in shared}, direction)
        rate = optimizer.param_groups[0]["lr"] if self.alpha_lr is None else self.alpha_lr
        alpha.sub_(rate * (towards @ gradient)).clamp_(0, 1)

    def extra_gradient(self, client: Client, trained_state: State) -> Tensor | float:
        """What is added to the gradient that the parameters ``trained_state`` of ``v`` step with, as one vector."""
        return 0.0

    def _begun(self, client: Client, optimizer: Optimizer) -> Optimizer:
        """An optimizer like the client's own, for ``v``, which it changes in place in the memory."""
        self._personal = {name: nn.Parameter(value) for name, value in strip_prefix(client.method_state, "v").items()}
        params_by_name = dict(client.module.named_parameters())
        personal_optimizer = with_parameters(
            optimizer, {id(params_by_name[name]): p for name, p in self._personal.items()}
        )
        load_optimizer_state(personal_optimizer, strip_prefix(client.method_state, "optimizer"))
        return personal_optimizer

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        assert client.federation is not None  # as it needs one
        if not client.federation.settings.keep_optimizer_state or self._optimizer is None:
            return client.method_state
        return {**client.method_state, **with_prefix(optimizer_state(self._optimizer), "optimizer")}

    def personalize(self, client: Client, state: State) -> State:
        personal_params = {
            name: value.to(state[name].device) for name, value in strip_prefix(client.method_state, "v").items()
        }
        return (
            {**state, **interpolate(personal_params, state, client.method_state["alpha"])} if personal_params else state
        )


@torch.no_grad()
def interpolate(personal: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: Tensor) -> State:
    """``alpha v + (1 - alpha) w`` of the entries of ``personalize``; exactly w at 0 and v at 1."""
    return {name: torch.lerp(shared[name], v, alpha.to(v.device, v.dtype)) for name, v in personal.items()}


@dataclass(eq=False)
class Ditto(APFL):
    """Every step: a personal model ``v`` learns the task near the server's model (Li et al. 2021, Algorithm 1).

    The shared ``w`` travels and trains as without it. On each batch ``v``, too, takes a step, by an optimizer like that
    of ``w``, along the gradient of ``task loss + strength / 2 * ||v - w_server||^2``, of which w_server is what the
    client has received: `APFL` with a mixture of ``v`` alone, and a pull. A client begins with ``v`` where it is in its
    first round, predicts with it, as `APFL` says, keeps it, and sends what FedAvg sends.

    Args:
        strength: Weight (lambda) of the distance, at least 0; with 0, ``v`` learns from the client's data alone.

    Raises:
        ValueError: If ``strength`` is negative, or for what `APFL` raises it.

    Example:
        >>> Ditto(strength=0.1).alpha0
        1.0
    """

    needs: ClassVar[Needs] = Needs(
        labels=True,
        sample_loss=True,
        federation_reason="with a single client there is no shared model to stay near. Remove `Ditto`",
    )

    alpha0: float = field(default=1.0, init=False)
    alpha_lr: float | None = field(default=0.0, init=False)
    strength: float = validated(0.1, at_least, 0)

    def extra_gradient(self, client: Client, trained_state: State) -> Tensor:
        return self.strength * (
            flatten(trained_state) - flatten({name: client.received_state[name] for name in trained_state})
        )
