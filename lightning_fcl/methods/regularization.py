"""Penalties on changes of parameters, weighted by their importance for earlier experiences: EWC, MAS and SI."""

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
from lightning_fcl.methods.functional import optimized_parameters, trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.per_sample_gradients import fisher_diagonal, mean_sample_measure
from lightning_fcl.validation import above, at_least, between, validated

# Name of the entry of the client state by which the importance is multiplied.
_SCALE = "scale"


def summed(terms: Iterable[Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of scalar terms on the device of ``params``, or 0 if there are no terms."""
    return torch.stack([*terms, torch.zeros((), device=next(iter(params.values())).device)]).sum()


@dataclass(eq=False)
class Consolidation(Method):
    """Base class of EWC, MAS and SI: a quadratic penalty, weighted by the importance of the parameters."""

    needs: ClassVar[Needs] = Needs(round_samples=True, tensors=True)

    strength: float = validated(1.0, at_least, 0)
    decay: float = validated(1.0, between, 0, 1)
    normalize: bool = True

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        """Return the importance of the parameters ``names`` for the experience.

        See `MethodBase.end_experience` for the other arguments.
        """
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
        # Below this value the inverse can be infinite.
        tiny = torch.finfo(greatest.dtype).tiny
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
        # Use the stored names, not the trainable parameters: another method may have frozen parameters.
        earlier = strip_prefix(client.method_state, "importance")
        new = self.importance(client, trained_state, data, earlier)
        summed = {name: self.decay * value + new[name] for name, value in earlier.items()}
        return with_prefix({name: trained_state[name] for name in earlier}, "center") | with_prefix(
            summed, "importance"
        )


@dataclass(eq=False)
class EWC(Consolidation):
    """Elastic weight consolidation (Kirkpatrick et al., 2017, eq. 3): penalize changes of important parameters.

    The loss is ``task loss + strength / 2 * sum_i F_i * (theta_i - theta*_i)^2`` over the trainable parameters. theta*
    is the client's own model after its last round of its previous experience. F is the sum, over the client's earlier
    experiences, of the diagonal of the empirical Fisher information, ``mean_n (d log p(y_n | x_n) / d theta_i)^2``. The
    Fisher information is computed from the true labels and the data of the client's last round of the experience. A
    client keeps theta* and F, and uploads the same tensors as in FedAvg.

    Args:
        strength: Weight (lambda) of the penalty, at least 0. With 0, the method is fine-tuning.
        decay: Factor that multiplies the previous F when an experience ends, from 0 to 1. With 1, F is a plain sum.
        normalize: Whether to divide F by the client's greatest F_i. With plain SGD, the penalty alone then does not
            diverge if ``learning rate * strength`` is below 2. Stay well below 2, because the task loss adds its own
            curvature. False uses F as in the paper. Published strengths, such as 40,000 in Zuo et al. (2024), require
            False. With a strength of this size, training of many small networks diverges.

    Raises:
        ValueError: If ``strength`` or ``decay`` is out of range, or the module does not define
            ``sample_loss(output, y)``.
        TypeError: If the samples are not pairs.

    Example:
        >>> EWC(strength=10.0).strength
        10.0
    """

    citations: ClassVar[tuple[str, ...]] = ("kirkpatrick2017ewc",)

    needs: ClassVar[Needs] = Needs(sample_loss=True, round_samples=True, tensors=True)

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        return fisher_diagonal(client.module, trained_state, data, names)


@dataclass(eq=False)
class MAS(Consolidation):
    """Memory aware synapses (Aljundi et al., 2018): penalize changes of parameters that affect the output.

    The loss is ``task loss + strength / 2 * sum_i Omega_i * (theta_i - theta*_i)^2``, as in `EWC`. Omega needs no
    labels: ``mean_n |d ||f(x_n; theta)||_2^2 / d theta_i|``. Equation 4 of the paper has no factor 1 / 2, so its lambda
    is half the strength. A client keeps theta* and Omega, and uploads the same tensors as in FedAvg.

    Args:
        strength: Weight of the penalty, at least 0. With 0, the method is fine-tuning.
        decay: Factor that multiplies the previous Omega when an experience ends, from 0 to 1. With 1, Omega is a plain
            sum.
        normalize: Whether to divide Omega by its greatest entry, with the same effect as in `EWC`. Zuo et al. (2024)
            use a strength of 100 without normalization.

    Raises:
        ValueError: If ``strength`` or ``decay`` is out of range.
        TypeError: If the module's output is not a tensor, or the samples are not pairs.

    Example:
        >>> MAS(strength=2.0).strength
        2.0
    """

    citations: ClassVar[tuple[str, ...]] = ("aljundi2018mas",)

    strength: float = validated(0.5, at_least, 0)

    def importance(self, client: Client, trained_state: State, data: Batch, names: Iterable[str]) -> State:
        x, dummy_targets = data[0], torch.zeros(len(data[0]), device=data[0].device)
        return mean_sample_measure(
            client.module, lambda output, y: output.square().sum(), torch.abs, trained_state, x, dummy_targets, names
        )


@dataclass(eq=False)
class SI(Consolidation):
    """Synaptic intelligence (Zenke et al., 2017): penalize changes of parameters that reduced the loss.

    The loss is ``task loss + strength / 2 * sum_i Omega_i * (theta_i - theta*_i)^2``, as in `EWC`. Equation 4 of the
    paper has no factor 1 / 2, so its c is ``strength / 2``.

    Each step adds ``-g_i * (change of theta_i)`` to omega_i. g is the gradient of the loss without this penalty, before
    gradient clipping. When an experience ends, Omega_i increases by ``omega_i / (D_i^2 + damping)`` (eq. 5), or by 0 if
    this value is negative. D_i is the change of theta_i by the client's own steps of the experience, without the
    server's changes. For a quadratic loss, Omega_i tends to half the curvature.

    A client keeps four values per parameter and uploads the same tensors as in FedAvg. Clients train sequentially.

    Args:
        strength: Weight of the penalty, at least 0. With 0, the method is fine-tuning.
        decay: Factor that multiplies the previous Omega when an experience ends, from 0 to 1. With 1, Omega is a plain
            sum.
        normalize: Whether to divide Omega by its greatest entry, with the same effect as in `EWC`.
        damping: The paper's xi, above 0. It limits the Omega of parameters that have hardly changed.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> SI(strength=0.2).damping
        0.1
    """

    citations: ClassVar[tuple[str, ...]] = ("zenke2017si",)

    needs: ClassVar[Needs] = Needs()
    vectorizable: ClassVar[bool] = False

    strength: float = validated(0.5, at_least, 0)
    damping: float = validated(0.1, above, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Parameters and gradients before the client's last step.
        self._last: dict[str, tuple[Tensor, Tensor]] = {}

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
        """Add the effect of the latest step to the client state, and discard the recorded step."""
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
