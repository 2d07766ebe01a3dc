"""LVT: replay, distillation and an importance-weighted attention penalty for a lifelong vision transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import HasLogitMask
from lightning_fcl.methods.base import matches
from lightning_fcl.methods.context import Client, Step, strip_prefix, with_prefix
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.episodic import add_to_task, finite_pairs
from lightning_fcl.methods.fedvit import lowest_loss
from lightning_fcl.methods.functional import predictions, require_sample_loss, trainable_parameters
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.per_sample_gradients import mean_sample_measure
from lightning_fcl.methods.regularization import summed
from lightning_fcl.validation import above, at_least, unit_interval, validated


@dataclass(eq=False)
class LVTMethod(Method):
    """LVT: attention regularization, replay and distillation for a lifelong vision transformer (Wang et al., 2022).

    From a client's second task on, the loss of a step is

    ``CE + gamma * ||G * (K - K_prev)||_1 + alpha * CE_mem + beta * KD_mem``

    - CE is the task loss on the batch.
    - K contains the attention keys and biases that are parameters of the model (`lightning_fcl.models.LVT`).
    - K_prev is K at the end of the client's previous task.
    - G is the importance of K for the previous task: the mean of ``|d loss / d K|`` over the task's samples. The paper
      uses the sum of the gradients, which vanishes if the model has learned the task.
    - CE_mem is the task loss on replay samples. The samples of each step are drawn with torch's global generator.
    - KD_mem is the distillation loss on the replay samples: the cross-entropy at ``temperature`` against the logits
      that were stored with the samples.

    When a task ends, the client stores the share ``rho`` of each class's samples: the samples with the lowest losses.
    The paper has a confidence-aware memory of fixed size instead. The losses are computed with the client's own model
    after the client's last round of the task. If the rounds of a task have different samples, the client selects from
    the new samples of each round, with its model after this round. G is then the mean over the new samples of the
    task's last round. Stored samples, K_prev and G stay on the client. The client uploads the same tensors as in
    FedAvg. Two parts of the paper are not implemented: the second classifier for new tasks only, and the decay of the
    first classifier's weight.

    Args:
        gamma: Weight of the attention loss, at least 0. With 0, K is not regularized and not stored.
        alpha: Weight of the loss on replay samples, at least 0.
        beta: Weight of the distillation on replay samples, at least 0. With ``alpha=beta=0``, no sample is stored.
        rho: Share of the samples of each class that is stored, above 0 and at most 1.
        temperature: Temperature of the teacher's and the student's logits in the distillation, above 0.
        batch_size: Maximum number of replay samples per step. None: the size of the batch.
        keys: Shell-style pattern of the parameter names of K.

    Raises:
        ValueError: If an argument is out of range, or the module has no `sample_loss`. Also if ``gamma`` is not 0 and
            ``keys`` matches no trainable parameter.
        TypeError: If the samples are not pairs.

    Example:
        >>> LVTMethod(gamma=1.0, alpha=1.0, beta=0.5).keys
        '*.external_*'
    """

    citations: ClassVar[tuple[str, ...]] = ("wang2022lvt",)

    vectorizable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(sample_loss=True, round_samples=True, tensors=True)
    accumulates: ClassVar[bool] = True

    gamma: float = validated(1.0, at_least, 0)
    alpha: float = validated(1.0, at_least, 0)
    beta: float = validated(0.5, at_least, 0)
    rho: float = validated(0.1, unit_interval)
    temperature: float = validated(2.0, above, 0)
    batch_size: int | None = validated(None, at_least, 1)
    keys: str = "*.external_*"

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.gamma and not any(matches(name, self.keys) for name in trainable_parameters(pl_module)):
            raise InvalidValueError(
                f"Expected `keys` to match trainable parameters, but `{self.keys}` matches no trainable parameter.",
                hint="Train `lightning_fcl.models.LVT` with the default `keys`, or set `gamma=0`.",
                argument="keys",
            )

    def prepare_client_state(self, client: Client) -> StateSection:
        device = next(iter(client.received_state.values())).device
        return {name: value.to(device) for name, value in client.method_state.items()}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        memory = client.method_state
        total: Tensor | float = 0.0
        gradient, previous = strip_prefix(memory, "gradient"), strip_prefix(memory, "previous")
        if self.gamma and gradient:
            gradient_changes = [
                (g, step.params[name] - previous[name]) for name, g in gradient.items() if name in step.params
            ]
            total = total + self.gamma * summed([(g * moved).abs().sum() for g, moved in gradient_changes], step.params)
        if not (self.alpha or self.beta) or "task" not in memory:
            return total
        module, size = client.module, len(step.output) if self.batch_size is None else self.batch_size
        sampled_indices = torch.randperm(len(memory["y"]))[:size].to(memory["y"].device)
        logits = memory["logits"][sampled_indices]

        def loss(output: Tensor, y: Tensor) -> Tensor:
            values: Tensor = self.alpha * require_sample_loss(module).sample_loss(output, y)
            if not self.beta:
                return values
            student, teacher = output, logits.to(output)
            if isinstance(module, HasLogitMask):
                student, teacher = module.mask_logits(student, y), module.mask_logits(teacher, y)
            return values + self.beta * distillation_loss(student, teacher, self.temperature)

        return total + step.loss_fn(memory["x"][sampled_indices], memory["y"][sampled_indices], loss=loss)

    def end_experience(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory, module = client.method_state, client.module
        x, y = finite_pairs(data)
        if not len(y):
            return client.result or memory
        if self.gamma:
            # Include parameters that another method may have frozen in the meantime.
            names = [name for name, _ in module.named_parameters() if matches(name, self.keys)]
            gradient = mean_sample_measure(
                module,
                lambda output, y: require_sample_loss(module).sample_loss(output, y).sum(),
                torch.abs,
                trained_state,
                x,
                y,
                names,
            )
            memory = (
                memory
                | with_prefix({name: trained_state[name] for name in names}, "previous")
                | with_prefix(gradient, "gradient")
            )
        if not (self.alpha or self.beta):
            return memory
        x, y = x.to(module.device), y.to(module.device)
        logits = predictions(module, trained_state, x)
        indices = lowest_loss(require_sample_loss(module).sample_loss(logits, y), y, self.rho)
        samples = {"x": x[indices], "y": y[indices], "logits": logits[indices]}
        return add_to_task(memory, client.result, samples, client.client_round.experience_idx)
