"""APFL and Ditto: each client trains a personal model in addition to the shared model."""

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
from lightning_fcl.methods.functional import (
    make_gradient_fn,
    optimized_parameters,
    scalar_dtype,
    step_along,
    trainable_parameters,
)
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.projection import flatten
from lightning_fcl.validation import at_least, between, validated


@dataclass(eq=False)
class APFL(Method):
    """Adaptive personalized federated learning (Deng et al., 2020): mix a personal model with the shared model.

    The shared model ``w`` trains and is uploaded as without APFL. Each client also has a personal model ``v`` and a
    weight ``alpha``. The mixed model is ``v_bar = alpha v + (1 - alpha) w``. g is the gradient of the task loss at
    ``v_bar`` on the batch of the step, including replay samples. In each step, ``v`` is updated with the gradient
    ``alpha g`` (Algorithm 1), and ``alpha`` with the gradient ``<v - w, g>`` (eq. 10). ``alpha`` is clipped to [0, 1].

    The client keeps ``v`` and ``alpha`` between rounds. ``v`` has the trainable parameters only, and uses the buffers
    of ``w``. A client predicts with ``v_bar`` of the client's ``v`` and the server's ``w``, see `personalize`.
    ``ContinualMetrics(when="aggregated")`` tests this model.

    Deviation from the paper: ``v`` has an optimizer with the class and settings of the optimizer of ``w``. The paper
    uses SGD. Clients train sequentially. A step takes two forward and backward passes instead of one.

    Args:
        alpha0: Initial value of ``alpha``, from 0 to 1.
        alpha_lr: Step size of ``alpha``. None uses the learning rate of the optimizer, as in the paper. 0 keeps
            ``alpha`` fixed.

    Raises:
        ValueError: If an argument is out of range, the Trainer does not run a federation, or the module does not define
            ``sample_loss(output, y)``. Also if the Trainer's ``accumulate_grad_batches`` is not 1.

    Example:
        >>> APFL(alpha0=0.5).alpha0
        0.5
    """

    citations: ClassVar[tuple[str, ...]] = ("deng2020apfl",)

    vectorizable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        labels=True,
        sample_loss=True,
        federation_reason="`APFL` mixes with a shared model, which a single client does not have. Remove `APFL`",
    )

    alpha0: float = validated(0.5, between, 0, 1)
    alpha_lr: float | None = validated(None, at_least, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trainable: list[str] = []
        # The parameters of the current client's personal model.
        self._personal: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise InvalidValueError(
                f"Expected `accumulate_grad_batches=1` for `{type(self).__name__}`, whose personal model takes a step "
                f"on each batch, but got {trainer.accumulate_grad_batches}.",
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
        alpha = client.method_state.get("alpha", torch.tensor(self.alpha0, dtype=scalar_dtype(personal_entries)))
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
            # Skip the step, so that the stored personal model stays finite.
            return
        towards = flatten(personal_params) - flatten(shared).detach()
        # A learning rate schedule may have changed the settings in the optimizer's parameter groups.
        set_group_values(self._optimizer, group_values(optimizer))
        direction = alpha * gradient + self.extra_gradient(client, personal_params)
        step_along(pl_module, self._optimizer, {name: self._personal[name] for name in shared}, direction)
        rate = optimizer.param_groups[0]["lr"] if self.alpha_lr is None else self.alpha_lr
        alpha.sub_(rate * (towards @ gradient)).clamp_(0, 1)

    def extra_gradient(self, client: Client, trained_state: State) -> Tensor | float:
        """Return a vector to add to the gradient of ``v``. ``trained_state`` has the current parameters of ``v``."""
        return 0.0

    def _begun(self, client: Client, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer for ``v`` with the class and settings of the client's optimizer.

        The optimizer's steps change ``v`` in the client state in place.
        """
        self._personal = {name: nn.Parameter(value) for name, value in strip_prefix(client.method_state, "v").items()}
        params_by_name = dict(client.module.named_parameters())
        personal_optimizer = with_parameters(
            optimizer, {id(params_by_name[name]): p for name, p in self._personal.items()}
        )
        load_optimizer_state(personal_optimizer, strip_prefix(client.method_state, "optimizer"))
        return personal_optimizer

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        # `federation_reason` in `needs` requires a federation.
        assert client.federation is not None
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
    """Return ``alpha v + (1 - alpha) w`` for the entries of ``personal``. If alpha is 0 or 1, the result is exact."""
    return {name: torch.lerp(shared[name], v, alpha.to(v.device, v.dtype)) for name, v in personal.items()}


@dataclass(eq=False)
class Ditto(APFL):
    """Ditto (Li et al., 2021, Algorithm 1): train a personal model that stays near the server's model.

    The shared model ``w`` trains and is uploaded as without Ditto. On each batch, the personal model ``v`` also takes a
    step, with an optimizer like the optimizer of ``w``, along the gradient of
    ``task loss + strength / 2 * ||v - w_server||^2``. w_server is the model that the client has received. Ditto is
    `APFL` with ``alpha`` fixed at 1 and this penalty.

    In its first round a client initializes ``v`` with the received model. The client keeps ``v`` and predicts with it,
    as described for `APFL`. The client uploads the same tensors as in FedAvg.

    Args:
        strength: Weight (lambda) of the distance, at least 0. With 0, ``v`` is trained on the client's data only.

    Raises:
        ValueError: If ``strength`` is negative, or for the same reasons as in `APFL`.

    Example:
        >>> Ditto(strength=0.1).alpha0
        1.0
    """

    citations: ClassVar[tuple[str, ...]] = ("li2021ditto",)

    needs: ClassVar[Needs] = Needs(
        labels=True,
        sample_loss=True,
        federation_reason="`Ditto` stays near a shared model, which a single client does not have. Remove `Ditto`",
    )

    alpha0: float = field(default=1.0, init=False)
    alpha_lr: float | None = field(default=0.0, init=False)
    strength: float = validated(0.1, at_least, 0)

    def extra_gradient(self, client: Client, trained_state: State) -> Tensor:
        return self.strength * (
            flatten(trained_state) - flatten({name: client.received_state[name] for name in trained_state})
        )
