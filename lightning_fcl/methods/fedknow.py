"""FedKNOW: gradient projection for past tasks. For each task, a client keeps the largest weights of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.context import Client, strip_prefix, with_prefix
from lightning_fcl.methods.distillation import distillation_loss
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.fedvit import FedViT
from lightning_fcl.methods.functional import GradientFn, evaluation_mode, make_teacher_fn, require_sample_loss, to_input
from lightning_fcl.validation import above, at_least, validated

# Number of samples per optimizer step when the kept weights are tuned.
_BATCH = 32


@dataclass(eq=False)
class FedKNOW(FedViT):
    """FedKNOW: gradient projection for past tasks, of which a client keeps the largest weights (Luopan et al., 2022).

    `FedKNOW` has the training stages, the task selection and the gradient projection of `FedViT`. The knowledge of a
    task is different: the client keeps weights instead of samples.

    When a task ends, the client selects weights in each linear and convolutional layer of the body. From the weights
    that no earlier task has kept, the client keeps the weights with the largest absolute values. The number of kept
    weights is the share ``rho`` of all weights of the layer, or fewer if not enough weights are free. No weight is kept
    for two tasks. The new weights are then tuned on the samples of the task's last round, while all weights that no
    task has kept are zero.

    The network of a past task has the weights that this task and all earlier tasks kept. All other weights of these
    layers are zero, as in PackNet (Mallya and Lazebnik, 2018). All other tensors, such as biases, normalization layers
    and the head, are copies from the end of the task. The gradient of a past task is the gradient of a distillation
    loss on the current batch. The teacher is the network of the past task. The loss uses the logits of the task's
    classes.

    Args:
        rho: Share of each layer's weights that is kept for a task, above 0 and at most 1.
        temperature: Temperature of the teacher's and the student's logits in the distillation, above 0.
        tune_epochs: Number of epochs of tuning, on the samples of the task's last round. 0 disables tuning.
        tune_lr: Learning rate of Adam for tuning, above 0.
        k: Number of past tasks that constrain a step. See `FedViT` for `k` and all other arguments.

    Raises:
        ValueError: If an argument is out of range, or the body has no linear or convolutional layer. See also `FedViT`.

    Example:
        >>> FedKNOW(rho=0.1, k=10).tune_epochs
        5
    """

    citations: ClassVar[tuple[str, ...]] = ("luopan2022fedknow",)

    accumulates: ClassVar[bool] = False

    temperature: float = validated(2.0, above, 0)
    tune_epochs: int = validated(5, at_least, 0)
    tune_lr: float = validated(5e-4, above, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._networks: dict[int, State] = {}

    def start_client(self, client: Client) -> None:
        super().start_client(client)
        self._networks = {}

    def extract_knowledge(
        self, client: Client, method_state: StateSection, trained_state: State, data: Batch
    ) -> StateSection:
        (x, y), client_round = finite_pairs(data), client.client_round
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        names = [f"{place}.weight" for place, layer in client.module.named_modules() if isinstance(layer, kinds)]
        weights = [name for name in names if not fnmatchcase(name, self.head_pattern)]
        if not weights:
            raise InvalidValueError(
                f"Expected a body with linear or convolutional layers for `{type(self).__name__}`, but "
                f"`{type(client.module).__name__}` has no such layer outside of `head_pattern={self.head_pattern}`.",
                hint="Use `FedViT`.",
            )
        number, owners, kept_weights = (
            client_round.experience_idx + 1,
            strip_prefix(method_state, "owner"),
            strip_prefix(method_state, "kept"),
        )
        for name in weights:
            owner = owners.get(name, torch.zeros_like(trained_state[name], dtype=torch.int16)).to(
                trained_state[name].device
            )
            owners[name] = owner = torch.where(owner == number, 0, owner)
            new = largest(trained_state[name], owner == 0, self.rho)
            owners[name] = torch.where(new, number, owner)
            kept_weights[name] = torch.where(
                new,
                trained_state[name],
                kept_weights.get(name, torch.zeros_like(trained_state[name])).to(trained_state[name].device),
            )
        small = {name: value for name, value in trained_state.items() if name not in weights}
        method_state = {name: value for name, value in method_state.items() if not name.startswith(("owner.", "kept."))}
        method_state |= (
            with_prefix(owners, "owner")
            | with_prefix(kept_weights, "kept")
            | with_prefix(small, f"small{client_round.experience_idx}")
        )
        classes = client_round.task_classes or range(client_round.num_classes)
        method_state[f"block{client_round.experience_idx}"] = torch.tensor(classes, dtype=torch.long)
        return method_state | with_prefix(
            self._tuned(client.module, method_state, client_round.experience_idx, x, y), "kept"
        )

    def _tuned(self, module: L.LightningModule, memory: StateSection, task: int, x: Tensor, y: Tensor) -> State:
        network, owners, kept_weights = (
            load_task_network(memory, task),
            strip_prefix(memory, "owner"),
            strip_prefix(memory, "kept"),
        )
        leaves = {name: network[name].requires_grad_() for name in kept_weights}
        optimizer = torch.optim.Adam(leaves.values(), lr=self.tune_lr)
        with evaluation_mode(module), isolate_rng(), torch.enable_grad():
            for inputs, label in [*zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)] * self.tune_epochs:
                output = functional_call(module, network, (to_input(module, inputs),))
                loss = require_sample_loss(module).sample_loss(output, label.to(module.device)).mean()
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
                    leaf.grad = gradient * (owners[name] == task + 1)
                optimizer.step()
        # Adam did not change the weights of other tasks during tuning, because their gradients were always zero.
        return {n: torch.where(owners[n] == task + 1, leaf.detach(), kept_weights[n]) for n, leaf in leaves.items()}

    def past_tasks(self, client: Client) -> list[int]:
        numbers = sorted(int(name.removeprefix("block")) for name in client.method_state if name.startswith("block"))
        return [number for number in numbers if number != client.client_round.experience_idx]

    def past_gradient(self, client: Client, task: int, gradient_of: GradientFn) -> Tensor:
        """Return the gradient of the distillation loss from a past task's network on the current batch, as a vector."""
        if task not in self._networks:
            self._networks[task] = load_task_network(client.method_state, task)
        x, classes = finite_pairs(client.batch)[0], client.method_state[f"block{task}"]
        teacher = make_teacher_fn(client.module)(self._networks[task], x)[:, classes.to(x.device)]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return distillation_loss(output[:, classes.to(output.device)], target, self.temperature)

        return gradient_of(x, teacher, loss=loss)


def largest(weight: Tensor, free: Tensor, rho: float) -> Tensor:
    """Return a mask of the free weights with the largest absolute values, which are kept for a task.

    The mask selects the share ``rho`` of all weights of the layer, or all free weights if there are fewer.
    """
    size = min(round(rho * weight.numel()), int(free.sum()))
    magnitude = torch.where(free, weight.abs(), -1.0).flatten()
    mask = torch.zeros_like(magnitude, dtype=torch.bool)
    mask[magnitude.topk(size).indices] = True
    return mask.view(weight.shape)


def load_task_network(method_state: Mapping[str, Tensor], task: int) -> State:
    """Return the state of a task's network. See `FedKNOW`.

    Weights that this task or an earlier task kept have their kept values. All other weights of the layers are zero.
    """
    owners, kept_weights = strip_prefix(method_state, "owner"), strip_prefix(method_state, "kept")
    weights = {name: torch.where(owners[name] <= task + 1, value, 0.0) for name, value in kept_weights.items()}
    return weights | strip_prefix(method_state, f"small{task}")
