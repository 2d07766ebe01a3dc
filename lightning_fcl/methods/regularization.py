"""Penalties on parameters by their importance for earlier experiences: EWC, MAS and SI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix, zeros_like_state
from lightning_fcl.methods.functional import optimized_parameters, require_sample_loss, trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.per_sample_gradients import mean_sample_measure
from lightning_fcl.validation import above, at_least, between, validated

_SCALE = "scale"  # the entry of a memory that the importance is multiplied by


def summed(terms: Iterable[Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalars, 0 where there are none, on the device of ``params``."""
    return torch.stack([*terms, torch.zeros((), device=next(iter(params.values())).device)]).sum()


@dataclass(eq=False)
class Consolidation(Method):
    """What EWC, MAS and SI share: the penalty, and when the importance of the parameters is taken."""

    needs: ClassVar[Needs] = Needs(round_samples=True, tensors=True)

    strength: float = validated(1.0, at_least, 0)
    decay: float = validated(1.0, between, 0, 1)
    normalize: bool = True

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        """Return the importance of some parameters for the experience. The arguments are those of `end_experience`."""
        raise NotImplementedError

    def prepare_client_state(self, client: Client) -> StateSection:
        memory = client.method_state
        if self.strength == 0:
            return memory
        if not memory:
            params = {name: client.received_state[name] for name in trainable_parameters(client.module)}
            memory = with_prefix(params, "center") | with_prefix(zeros_like_state(params), "importance")
        memory = {
            n: value.to(client.received_state[n.split(".", 1)[1]].device) for n, value in memory.items() if n != _SCALE
        }
        if not self.normalize:
            return memory
        greatest = torch.stack([value.max() for value in strip_prefix(memory, "importance").values()]).max()
        tiny = torch.finfo(greatest.dtype).tiny  # below it, its inverse would be infinite
        return memory | {_SCALE: torch.where(greatest > 0, 1 / greatest.clamp(min=tiny), 0.0)}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        memory = client.method_state
        if self.strength == 0:
            return 0.0
        center, importance = strip_prefix(memory, "center"), strip_prefix(memory, "importance")
        squared_changes = {
            name: (value - center[name]).square() for name, value in step.params.items() if name in importance
        }
        penalty = 0.5 * summed(
            [(importance[name] * value).sum() for name, value in squared_changes.items()], step.params
        )
        return self.strength * (memory[_SCALE] * penalty if _SCALE in memory else penalty)

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        if self.strength == 0:
            return client.method_state
        earlier = strip_prefix(
            client.method_state, "importance"
        )  # not of what learns now: another method may have frozen a part
        new = self.importance(client, trained_state, data, earlier)
        summed = {name: self.decay * value + new[name] for name, value in earlier.items()}
        return with_prefix({name: trained_state[name] for name in earlier}, "center") | with_prefix(
            summed, "importance"
        )


@dataclass(eq=False)
class EWC(Consolidation):
    """Every step: holds what was important in the client's earlier experiences (Kirkpatrick et al. 2017, equation 3).

    ``task loss + strength / 2 * sum_i F_i * (theta_i - theta*_i)^2`` over the trainable parameters. theta* is the
    client's own model after its latest round of its latest experience. F is the sum, over its experiences, of the
    diagonal of the empirical Fisher information, ``mean_n (d log p(y_n | x_n) / d theta_i)^2``. Each is computed from
    the data of the last round of the experience that the client trained in, and their true labels.

    Args:
        strength: Weight (lambda) of the penalty, at least 0; 0 is fine-tuning.
        decay: What remains of the earlier experiences' F when an experience ends, 0 to 1; 1 sums them.
        normalize: Whether F, summed as it is, is divided by the client's greatest F_i. The penalty alone then never
            blows up with plain SGD whose ``learning rate * strength`` is below 2; stay well below, as the task loss
            adds its own curvature. False: the paper's F as it is; the strengths of papers, 40,000 in Zuo et al. 2024,
            belong to it, and blow up many a small network.

    Raises:
        ValueError: If ``strength`` or ``decay`` is outside its range, or the module does not state its loss apart.
        TypeError: If the samples are no pairs.

    Example:
        >>> EWC(strength=10.0).strength
        10.0
    """

    needs: ClassVar[Needs] = Needs(sample_loss=True, round_samples=True, tensors=True)

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        loss = require_sample_loss(client.module).sample_loss
        return mean_sample_measure(
            client.module, lambda output, y: loss(output, y).sum(), torch.square, trained_state, data[0], data[1], names
        )


@dataclass(eq=False)
class MAS(Consolidation):
    """Every step: holds what the client's output depended on in earlier experiences (Aljundi et al. 2018).

    ``task loss + strength / 2 * sum_i Omega_i * (theta_i - theta*_i)^2``, as in `EWC`, but Omega is without labels,
    ``mean_n |d ||f(x_n; theta)||_2^2 / d theta_i|``. The paper's equation 4 has no 1 / 2: its lambda is half the
    strength.

    Args:
        strength: Weight of the penalty, at least 0; 0 is fine-tuning.
        decay: What remains of the earlier experiences' Omega when an experience ends, 0 to 1; 1 sums them.
        normalize: Whether Omega is divided by its greatest entry, with what this promises: see `EWC`. Zuo et al. 2024
            have a strength of 100 without.

    Raises:
        ValueError: If ``strength`` or ``decay`` is outside its range.
        TypeError: If the module's output is no tensor, or the samples are no pairs.

    Example:
        >>> MAS(strength=2.0).strength
        2.0
    """

    strength: float = validated(0.5, at_least, 0)

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        x, dummy_targets = data[0], torch.zeros(len(data[0]), device=data[0].device)
        return mean_sample_measure(
            client.module, lambda output, y: output.square().sum(), torch.abs, trained_state, x, dummy_targets, names
        )


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

    strength: float = validated(0.5, at_least, 0)
    damping: float = validated(0.1, above, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: dict[str, tuple[Tensor, Tensor]] = {}  # parameters and gradients before the client's last step

    def prepare_client_state(self, client: Client) -> StateSection:
        memory = super().prepare_client_state(client)
        for name, value in strip_prefix(memory, "center").items():
            for key in (f"fall.{name}", f"moved.{name}"):
                memory[key] = memory[key].clone() if key in memory else torch.zeros_like(value)
        return memory

    def start_client(self, client: Client) -> None:
        self._last = {}

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        client, memory = self.client, self.client.method_state
        self._note_step(client, dict(pl_module.named_parameters()))
        weight = self.strength * memory.get("scale", 1.0)
        for name, p in optimized_parameters(optimizer, pl_module).items():
            if client.is_active and p.grad is not None and f"fall.{name}" in memory:
                of_penalty = weight * memory[f"importance.{name}"] * (p - memory[f"center.{name}"])
                self._last[name] = p.clone(), p.grad - of_penalty

    def _note_step(self, client: Client, current_params: Mapping[str, Tensor]) -> None:
        """Note what the last step has done, once."""
        for name, (previous_value, gradient) in self._last.items():
            change = current_params[name] - previous_value
            client.method_state[f"fall.{name}"].sub_(gradient * change)
            client.method_state[f"moved.{name}"].add_(change)
        self._last = {}

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        self._note_step(client, trained_state)
        return client.method_state

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        fall, movement = strip_prefix(client.method_state, "fall"), strip_prefix(client.method_state, "moved")
        return {name: fall[name].clamp(min=0) / (movement[name].square() + self.damping) for name in names}
