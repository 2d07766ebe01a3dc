"""Samples of each of a client's tasks, which it remembers: GEM, A-GEM, and BCN, which plays a game with them."""

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
    """Raise ValueError if an argument is no number of samples and no share. Warn if it is the integer 1."""
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
    """What GEM, A-GEM and BCN share: a client remembers samples of each of its tasks. See `GEM` for which."""

    needs: ClassVar[Needs] = Needs(sample_loss=True, round_samples=True, tensors=True)

    memory_size: int | float = validated(0.1, check_memory_size)  # jsonargparse takes the first type that fits

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        return add_task_memory(client, data, self.memory_size, client.generator)


@dataclass(eq=False)
class GEM(Episodic):
    """Every step: rotates the gradient until it raises the loss of no past task (Lopez-Paz and Ranzato 2017).

    A client remembers samples of each of its tasks (experiences). Their gradients g_i at the present parameters
    constrain the step's gradient g: it becomes the nearest g' with ``<g', g_i> >= 0`` for all past tasks, eq. 11 (see
    `lightning_fcl.methods.projection.project`).

    A task's samples are drawn after each round that the client trains in, in their classes' proportions, and at least
    one of each class if there is room. If the rounds of a task have different samples, they are drawn among those that
    the client has of the task and the round's new ones.

    Args:
        memory_size: Samples kept of each task: an int is their number, a float a share of the client's data in a round.
        margin: Least weight of each past gradient once one is violated (the authors' memory strength); 0: eq. 11.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.

    Example:
        >>> GEM(memory_size=0.1, margin=0.5).margin
        0.5
    """

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
    """Every step: takes from the gradient what raises the mean loss of the past tasks (Chaudhry et al. 2019).

    As `GEM` with a single constraint: the gradient of the samples of all past tasks together, ``g - (g^T g_ref /
    g_ref^T g_ref) g_ref`` where ``g^T g_ref < 0``, eq. 11 (see `lightning_fcl.methods.projection.agem`).

    Args:
        memory_size: Samples kept of each task. See `GEM`.
        batch_size: Samples of the reference, drawn anew at each step from torch's global generator, as in the paper;
            None: all that are remembered.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.

    Example:
        >>> AGEM(memory_size=20, batch_size=256).batch_size
        256
    """

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
    """The numbers of the tasks of which a client remembers samples, but the present one's, ascending."""
    numbers = torch.unique(client.method_state["task"]).tolist() if "task" in client.method_state else []
    return [number for number in numbers if number != client.client_round.experience_idx]


def past_tasks(client: Client) -> list[tuple[Tensor, Tensor]]:
    """The remembered samples ``(x, y)`` of each task but the present one, in order."""
    memory = client.method_state
    task_masks = [memory["task"] == number for number in past_task_indices(client)]
    return [(memory["x"][rows], memory["y"][rows]) for rows in task_masks]


def past_samples(client: Client) -> tuple[Tensor, Tensor] | None:
    """Those of all tasks but the present one together; None where there are none."""
    tasks = past_tasks(client)
    x, y = ([task[part] for task in tasks] for part in (0, 1))
    return (torch.cat(x), torch.cat(y)) if tasks else None


def add_task_memory(client: Client, data: Batch, max_size: int | float, generator: torch.Generator) -> StateSection:
    """Return the client's state with samples of its current task, a number of them or a share of a round's."""
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
    """A client's samples, if they are pairs; those with numbers that are not finite are left out, with a warning."""
    if not isinstance(data, list | tuple) or len(data) != 2:
        parts = f"{len(data)} parts" if isinstance(data, list | tuple) else type(data).__name__
        raise InvalidTypeError(
            f"Expected samples `[x, y]` to remember but got {parts}.",
            hint="Return `[x, y]` pairs from the dataset.",
            argument="data",
        )
    x, y = data
    if x.is_floating_point() and not torch.isfinite(x.sum()):
        finite = torch.isfinite(x).flatten(1).all(dim=1)
        bad = int((~finite).sum())
        log.warning("%d of %d samples have numbers that are not finite: they are not remembered.", bad, len(finite))
        x, y = x[finite], y[finite]
    return x, y


def memory_pairs(method_state: StateSection) -> tuple[Tensor, Tensor] | None:
    """The samples ``(x, y)`` in a memory; None where there are none yet."""
    return (method_state["x"], method_state["y"]) if "x" in method_state else None


def add_task_labels(method_state: StateSection, samples: StateSection, task: int) -> StateSection:
    """The memory with samples, by name, such as ``x`` and ``y``, in place of a task's earlier ones."""
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
    """Return a state of samples alone, as `add_task_labels` makes it of none, without the samples of a task."""
    if "task" not in memory:
        return memory
    is_other_task = memory["task"] != task
    return {name: value[is_other_task] for name, value in memory.items()}


def add_to_task(memory: StateSection, result: StateSection, samples: StateSection, task: int) -> StateSection:
    """Return a state with samples of a task, beside those of it that ``result`` has."""
    earlier = result["task"] == task if "task" in result else torch.zeros(0, dtype=torch.bool)
    if earlier.any():
        earlier_samples = {name: result[name][earlier].to(value.device) for name, value in samples.items()}
        samples = {name: concat_nested([earlier_samples[name], value]) for name, value in samples.items()}
    return add_task_labels(memory, samples, task)


def stratified_indices(y: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Indices of ``size`` samples drawn in their classes' proportions, in order; all samples if there are no more.

    Every class has at least one sample where ``size`` allows it. The rest of each share that is no whole number goes to
    the classes with the largest, by lot where these are equal.
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
    """Indices of equally many samples of each class, as many as the rarest has, drawn and in random order."""
    classes, counts = torch.unique(y, return_counts=True)
    order = torch.randperm(len(y), generator=generator)
    indices = torch.cat([order[y[order] == c][: int(counts.min())] for c in classes])
    return indices[torch.randperm(len(indices), generator=generator)]


def has_task(method_state: StateSection, task: int) -> bool:
    return "task" in method_state and bool((method_state["task"] == task).any())


def worst_inputs(x: Tensor, gradient: Callable[[Tensor], Tensor], eps: float, steps: int) -> Tensor:
    """Inputs near ``x`` on which a loss is higher, by normalised gradient ascent (the first player).

    A step has the length ``eps``, by the norm over the channels; what is then farther from ``x`` comes back as far.
    """
    perturbed_x = x
    for _ in range(steps):
        change = perturbed_x + eps * F.normalize(gradient(perturbed_x), dim=1) - x
        perturbed_x = x + change * (eps / change.norm(dim=1, keepdim=True).clamp(min=eps))
    return perturbed_x


@dataclass(eq=False)
class BCN(Episodic):
    """Every step: rehearses, against the worst inputs and for the parameters that fit all tasks best.

    Balanced continual learning (Raghavan and Balaprakash 2021, section 3; BCN in Zuo et al. 2024). From a client's
    second task on a step's loss is

    ``beta * J_new + J_PN + (J_PN(x + delta) - J_PN) + (J_PN(theta_B) - J_PN)``

    J_new is the task loss on the batch, J_PN that on samples drawn anew at each step, with replacement and from torch's
    global generator, among the remembered ones of past tasks and the batch's. The first bracket is generalisation:
    delta makes the loss of these samples as high as `worst_inputs` can. The second is forgetting: theta_B is where
    plain gradient descent takes a copy of the parameters on the same samples. Gradients do not go through the players'
    moves.

    It differs from the authors' code in three things. There the copy theta_B is cut off the graph; here the gradient at
    theta_B counts, to first order. There the first of the ``x_steps`` does not move, and nothing holds within ``eps``.
    And there a batch is trained on kappa times over (3 with MNIST): use more local epochs. The defaults are those for
    MNIST; for CIFAR-100 they are ``eps=0.001, x_steps=1, theta_steps=1, inner_lr=1e-5``. A step costs ``4 + x_steps +
    theta_steps`` passes in place of one.

    Args:
        memory_size: Samples kept of each task. See `GEM`.
        beta: Weight of the task loss on the batch, at least 0.
        eps: How far an input may be moved; 0: the first player rests.
        x_steps: Moves of the first player; 0: it rests.
        theta_steps: Moves of the second player; 0: it rests.
        inner_lr: Learning rate of the second player, above 0.
        batch_size: Samples drawn at each step.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.
        TypeError: If inputs that are to be moved are no floating-point numbers.

    Example:
        >>> BCN(eps=0.0, theta_steps=0).beta
        0.99
    """

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
        assert step.y is not None  # as it needs labels
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
                f"Expected inputs of floating-point numbers, which `BCN` can move, but got {x.dtype}.",
                hint="Give it `eps=0`.",
                argument="x",
                value=x.dtype,
            )
        fixed = {name: value.detach() for name, value in step.params.items()}

        def gradient(perturbed_x: Tensor) -> Tensor:
            perturbed_x = perturbed_x.detach().requires_grad_()
            return torch.autograd.grad(step.loss_fn(perturbed_x, y, fixed), perturbed_x)[0]

        return worst_inputs(x, gradient, self.eps, self.x_steps)

    def _balanced(self, step: Step, x: Tensor, y: Tensor) -> State:
        """The second player's parameters, whose gradient is that of the present ones."""
        updated_params = {name: value.detach() for name, value in step.params.items()}
        for _ in range(self.theta_steps):
            leaves = {name: value.requires_grad_() for name, value in updated_params.items()}
            gradients = torch.autograd.grad(step.loss_fn(x, y, leaves), list(leaves.values()), materialize_grads=True)
            steps = zip(leaves.items(), gradients, strict=True)
            updated_params = {name: value.detach() - self.inner_lr * gradient for (name, value), gradient in steps}
        return {name: value + (updated_params[name] - value).detach() for name, value in step.params.items()}
