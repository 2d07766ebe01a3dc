"""Episodic memory methods, which store samples of each past task: GEM, A-GEM and BCN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.functional import GradientFn
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.projection import agem, project
from lightning_fcl.validation import above, at_least, validated, warn_of_one

log = logging.getLogger(__name__)


def check_memory_size(**arguments: int | float) -> None:
    """Raise ValueError if an argument is neither a number of samples nor a share. Warn about the integer 1."""
    for name, value in arguments.items():
        if not value > 0 or (isinstance(value, float) and value > 1):
            raise InvalidValueError(
                f"Expected `{name}` to be a number of samples, at least 1, or a share above 0 and up to 1.0, but got "
                f"{value}.",
                argument=name,
                value=value,
            )
        warn_of_one(name, value, "1 sample", "all samples")


@dataclass(eq=False)
class Episodic(Method):
    """Base class of GEM, A-GEM, BCN and DyTox: a client stores samples of each of its tasks, selected as in `GEM`."""

    needs: ClassVar[Needs] = Needs(sample_loss=True, round_samples=True, tensors=True)

    # For command line and YAML values, jsonargparse uses the first type of the union that accepts the value.
    memory_size: int | float = validated(0.1, check_memory_size)

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return add_task_memory(client, data, self.memory_size, client.generator)


@dataclass(eq=False)
class GEM(Episodic):
    """GEM: gradient episodic memory (Lopez-Paz and Ranzato, 2017).

    In each step, GEM changes the gradient so that, to first order, the step does not raise the loss on the stored
    samples of any past task. A client stores samples of each of its tasks (experiences). g_i is the gradient of the
    samples of past task i at the current parameters. The gradient g of the step becomes the nearest g' with
    ``<g', g_i> >= 0`` for all past tasks (eq. 11, see `lightning_fcl.methods.projection.project`). The stored samples
    never leave the client. A client uploads the same tensors as in FedAvg.

    After each round in which a client trains, GEM selects the stored samples of the current task again. The selection
    is random, in proportion to the classes. If `memory_size` permits, each class has at least one sample. If the rounds
    of a task have different samples, GEM selects from the stored samples of the task and the new samples of the round.

    Args:
        memory_size: Number of stored samples per task (int), or share of the client's data in a round (float).
        margin: Minimum weight of each past gradient if any constraint is violated (the authors' memory strength). With
            0, the projection is eq. 11.

    Raises:
        ValueError: If an argument is out of range, or the module has no ``sample_loss``.

    Example:
        >>> GEM(memory_size=0.1, margin=0.5).margin
        0.5
    """

    citations: ClassVar[tuple[str, ...]] = ("lopezpaz2017gem",)

    margin: float = validated(0.5, at_least, 0)

    def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
        tasks = past_tasks(client)
        if not tasks:
            return gradient
        constraints = gradient.new_empty(len(tasks), len(gradient))
        for row, (x, y) in zip(constraints, tasks, strict=True):
            row.copy_(gradient_fn(x, y))
        return project(gradient, constraints, self.margin)


@dataclass(eq=False)
class AGEM(Episodic):
    """A-GEM: averaged gradient episodic memory (Chaudhry et al., 2019).

    A-GEM is `GEM` with a single constraint. g_ref is the gradient of the stored samples of all past tasks. If
    ``g^T g_ref < 0``, the gradient g becomes ``g - (g^T g_ref / g_ref^T g_ref) g_ref`` (eq. 11, see
    `lightning_fcl.methods.projection.agem`).

    Args:
        memory_size: Number of stored samples per task, or a share. See `GEM`.
        batch_size: Maximum number of stored samples for g_ref. They are drawn again in each step, as in the paper, from
            torch's global random number generator. None: all stored samples.

    Raises:
        ValueError: If an argument is out of range, or the module has no ``sample_loss``.

    Example:
        >>> AGEM(memory_size=20, batch_size=256).batch_size
        256
    """

    citations: ClassVar[tuple[str, ...]] = ("chaudhry2019agem",)

    batch_size: int | None = validated(None, at_least, 1)

    def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
        past_data = past_samples(client)
        if past_data is None:
            return gradient
        x, y = past_data
        if self.batch_size is not None:
            sampled_indices = torch.randperm(len(y))[: self.batch_size].to(y.device)
            x, y = x[sampled_indices], y[sampled_indices]
        return agem(gradient, gradient_fn(x, y).to(gradient.dtype))


def past_task_indices(client: Client) -> list[int]:
    """Return the numbers of past tasks with stored samples, in ascending order. The current task is left out."""
    numbers = torch.unique(client.method_state["task"]).tolist() if "task" in client.method_state else []
    return [number for number in numbers if number != client.client_round.experience_idx]


def past_tasks(client: Client) -> list[tuple[Tensor, Tensor]]:
    """Return the stored samples ``(x, y)`` of each past task, in ascending order of the tasks."""
    memory = client.method_state
    task_masks = [memory["task"] == number for number in past_task_indices(client)]
    return [(memory["x"][rows], memory["y"][rows]) for rows in task_masks]


def past_samples(client: Client) -> tuple[Tensor, Tensor] | None:
    """Return the stored samples ``(x, y)`` of all past tasks in one pair of tensors, or None if there are none."""
    tasks = past_tasks(client)
    x, y = ([task[part] for task in tasks] for part in (0, 1))
    return (torch.cat(x), torch.cat(y)) if tasks else None


def add_task_memory(client: Client, data: Batch, max_size: int | float, generator: torch.Generator) -> StateSection:
    """Return the client's method state with a new selection of stored samples for the client's current task.

    Args:
        client: The client.
        data: The client's samples of the round.
        max_size: Number of samples to store (int), or share of the round's samples (float).
        generator: Random number generator for the selection.
    """
    memory, task = client.method_state, client.client_round.experience_idx
    x, y = finite_pairs(data)
    size = max_size if isinstance(max_size, int) else max(1, round(max_size * len(y)))
    history = client.history
    if history is not None and history.covers_experience:
        x, y = finite_pairs(client.select_samples(data, history.new_in_experience))
    elif history is not None and has_task(memory, task):
        x, y = finite_pairs(client.new_samples(data))
        of_task = (memory["task"] == task).nonzero()[:, 0]
        x, y = (
            concat_nested([memory["x"][of_task].to(x.device), x]),
            concat_nested([memory["y"][of_task].to(y.device), y]),
        )
    labels = y.cpu() if y.dim() == 1 and not y.is_floating_point() else torch.zeros(len(y), dtype=torch.long)
    indices = stratified_indices(labels, size, generator).to(y.device)
    return add_task_labels(memory, {"x": x[indices], "y": y[indices]}, task)


def finite_pairs(data: Batch) -> tuple[Tensor, Tensor]:
    """Return a client's samples ``(x, y)`` whose inputs are finite. Raise TypeError if the samples are not pairs."""
    if not isinstance(data, list | tuple) or len(data) != 2:
        length = f" and length {len(data)}" if isinstance(data, list | tuple) else ""
        raise InvalidTypeError(
            f"Expected samples `[x, y]`, but got data of type `{type(data).__name__}`{length}.",
            hint="Return `[x, y]` pairs from the dataset.",
            argument="data",
        )
    x, y = data
    if x.is_floating_point() and not torch.isfinite(x.sum()):
        finite = torch.isfinite(x).flatten(1).all(dim=1)
        bad = int((~finite).sum())
        log.warning("Ignored %d of %d samples of a client: their inputs have non-finite values.", bad, len(finite))
        x, y = x[finite], y[finite]
    return x, y


def memory_pairs(method_state: StateSection) -> tuple[Tensor, Tensor] | None:
    """Return the samples ``(x, y)`` in a method state. None if the state has no samples yet."""
    return (method_state["x"], method_state["y"]) if "x" in method_state else None


def add_task_labels(method_state: StateSection, samples: StateSection, task: int) -> StateSection:
    """Return a method state in which the samples of a task are replaced by other samples.

    Args:
        method_state: The method state.
        samples: The new samples of the task by name, such as ``x`` and ``y``.
        task: Number of the task.
    """
    first = next(iter(samples.values()))
    device = first.device
    new = {**samples, "task": torch.full((len(first),), task, device=device)}
    if "task" in method_state:
        is_other_task = method_state["task"].to(device) != task
        new = {
            name: concat_nested([method_state[name].to(device)[is_other_task], value]) for name, value in new.items()
        }
    return {**method_state, **new}


def without_task(memory: StateSection, task: int) -> StateSection:
    """Return a state without the samples of a task. Each entry of the state must have one row per sample."""
    if "task" not in memory:
        return memory
    is_other_task = memory["task"] != task
    return {name: value[is_other_task] for name, value in memory.items()}


def add_to_task(memory: StateSection, result: StateSection, samples: StateSection, task: int) -> StateSection:
    """Return a copy of ``memory`` in which a task has its samples from ``result``, followed by ``samples``."""
    earlier = result["task"] == task if "task" in result else torch.zeros(0, dtype=torch.bool)
    if earlier.any():
        earlier_samples = {name: result[name][earlier].to(value.device) for name, value in samples.items()}
        samples = {name: concat_nested([earlier_samples[name], value]) for name, value in samples.items()}
    return add_task_labels(memory, samples, task)


def stratified_indices(y: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return sorted indices of at most ``size`` random samples, in proportion to the classes.

    If ``size`` permits, each class has at least one sample. The number of samples of each class is rounded by largest
    remainder, and ties are broken at random.
    """
    size = min(size, len(y))
    classes, counts = torch.unique(y, return_counts=True)
    lot = torch.randperm(len(classes), generator=generator)
    classes, shares = classes[lot], counts[lot] * (size / max(len(y), 1))
    min_quota = 1 if size >= len(classes) else 0
    quota = shares.floor().clamp(min=min_quota)
    while (missing := size - int(quota.sum())) != 0:
        if missing > 0:
            quota[(shares - quota).argmax()] += 1
        else:
            quota[torch.where(quota > min_quota, quota - shares, -torch.inf).argmax()] -= 1
    order = torch.randperm(len(y), generator=generator)
    class_indices = [order[y[order] == c][: int(n)] for c, n in zip(classes, quota, strict=True)]
    return torch.cat(class_indices).sort().values if class_indices else order


def balanced_indices(y: Tensor, generator: torch.Generator) -> Tensor:
    """Return shuffled indices of random samples. Each class has as many samples as the rarest class."""
    classes, counts = torch.unique(y, return_counts=True)
    order = torch.randperm(len(y), generator=generator)
    indices = torch.cat([order[y[order] == c][: int(counts.min())] for c in classes])
    return indices[torch.randperm(len(indices), generator=generator)]


def has_task(method_state: StateSection, task: int) -> bool:
    return "task" in method_state and bool((method_state["task"] == task).any())


def worst_inputs(x: Tensor, gradient: Callable[[Tensor], Tensor], eps: float, steps: int) -> Tensor:
    """Return inputs near ``x`` with a higher loss, found by normalized gradient ascent. This is BCN's first player.

    Each step has the length ``eps`` in the norm over channels (dimension 1). If an input is then farther than ``eps``
    from ``x``, the input is moved back to this distance.
    """
    perturbed_x = x
    for _ in range(steps):
        change = perturbed_x + eps * F.normalize(gradient(perturbed_x), dim=1) - x
        perturbed_x = x + change * (eps / change.norm(dim=1, keepdim=True).clamp(min=eps))
    return perturbed_x


@dataclass(eq=False)
class BCN(Episodic):
    """BCN: balanced continual learning with replay (Raghavan and Balaprakash, 2021, section 3; Zuo et al., 2024).

    From a client's second task on, the loss of a step is

    ``beta * J_new + J_PN + (J_PN(x + delta) - J_PN) + (J_PN(theta_B) - J_PN)``

    J_new is the task loss on the batch. J_PN is the task loss on samples drawn in each step from the batch and the
    stored samples of past tasks. The draws use replacement and torch's global random number generator. The first
    bracket is generalization: `worst_inputs` finds the delta that raises the loss of these samples (first player). The
    second bracket is forgetting: theta_B is a copy of the parameters after plain gradient descent on the same samples
    (second player). No gradient flows through the moves of the players. A client stores samples as in `GEM`. It
    uploads the same tensors as in FedAvg.

    The method differs from the authors' code in three ways:

    - The authors detach theta_B from the graph. Here the gradient at theta_B is passed to the parameters, to first
      order.
    - In the authors' code, the first of the ``x_steps`` does not move the inputs, and no step limits them to ``eps``.
    - The authors train kappa times on each batch (3 for MNIST). Use more local epochs instead.

    The defaults are the values for MNIST. For CIFAR-100, use ``eps=0.001, x_steps=1, theta_steps=1, inner_lr=1e-5``. A
    step needs ``4 + x_steps + theta_steps`` forward and backward passes instead of one.

    Args:
        memory_size: Number of stored samples per task, or a share. See `GEM`.
        beta: Weight of the task loss on the batch, at least 0.
        eps: Maximum distance by which an input is moved, at least 0. With 0, the first bracket is left out.
        x_steps: Number of gradient steps of the first player. With 0, the first bracket is left out.
        theta_steps: Number of gradient steps of the second player. With 0, the second bracket is left out.
        inner_lr: Learning rate of the second player, above 0.
        batch_size: Number of samples drawn in each step.

    Raises:
        ValueError: If an argument is out of range, or the module has no ``sample_loss``.
        TypeError: If ``eps`` and ``x_steps`` are above 0 and the inputs are not floating-point numbers.

    Example:
        >>> BCN(eps=0.0, theta_steps=0).beta
        0.99
    """

    citations: ClassVar[tuple[str, ...]] = ("raghavan2021bcn", "zuo2024fedvit")

    vectorizable: ClassVar[bool] = False

    beta: float = validated(0.99, at_least, 0)
    eps: float = validated(0.1, at_least, 0)
    x_steps: int = validated(2, at_least, 0)
    theta_steps: int = validated(5, at_least, 0)
    inner_lr: float = validated(0.001, above, 0)
    batch_size: int = validated(128, at_least, 1)

    def task_weight(self, client: Client) -> float:
        return self.beta if past_tasks(client) else 1.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        past_data = past_samples(client)
        if past_data is None:
            return 0.0
        # `needs.labels` guarantees targets.
        assert step.y is not None
        pool = [torch.cat([old.to(new.device), new]) for old, new in zip(past_data, (step.x, step.y), strict=True)]
        sampled_indices = torch.randint(len(pool[1]), (self.batch_size,))
        x, y = (part[sampled_indices.to(part.device)] for part in pool)
        total = present = step.loss_fn(x, y)
        if self.eps > 0 and self.x_steps > 0:
            total = total + step.loss_fn(self._worst(step, x, y), y) - present
        if self.theta_steps > 0:
            total = total + step.loss_fn(x, y, self._balanced(step, x, y)) - present
        return total

    def _worst(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise InvalidTypeError(
                f"Expected floating-point inputs for `BCN` with `eps` above 0, but got {x.dtype}.",
                hint="Use `eps=0`.",
                argument="x",
                value=x.dtype,
            )
        fixed = {name: value.detach() for name, value in step.params.items()}

        def gradient(perturbed_x: Tensor) -> Tensor:
            perturbed_x = perturbed_x.detach().requires_grad_()
            return torch.autograd.grad(step.loss_fn(perturbed_x, y, fixed), perturbed_x)[0]

        return worst_inputs(x, gradient, self.eps, self.x_steps)

    def _balanced(self, step: Step, x: Tensor, y: Tensor) -> State:
        """Return the second player's parameters. Gradients pass through them unchanged to the current parameters."""
        updated_params = {name: value.detach() for name, value in step.params.items()}
        for _ in range(self.theta_steps):
            leaves = {name: value.requires_grad_() for name, value in updated_params.items()}
            gradients = torch.autograd.grad(step.loss_fn(x, y, leaves), list(leaves.values()), materialize_grads=True)
            steps = zip(leaves.items(), gradients, strict=True)
            updated_params = {name: value.detach() - self.inner_lr * gradient for (name, value), gradient in steps}
        return {name: value + (updated_params[name] - value).detach() for name, value in step.params.items()}
