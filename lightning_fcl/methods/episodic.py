"""Samples of each of a client's tasks, which it remembers: GEM and A-GEM let no step undo what was learnt of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.functional import GradientOf
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.projection import agem, project

log = logging.getLogger(__name__)


def memory_size(**arguments: int | float) -> None:
    """Refuse an argument that is neither a number of samples nor a share of them."""
    for name, value in arguments.items():
        if not value > 0 or (isinstance(value, float) and value > 1):
            raise ValueError(
                f"Expected `{name}` to be a number of samples, at least 1, or a share above 0 and up to 1.0, but got "
                f"{value}."
            )


@dataclass(eq=False)
class Episodic(Method):
    """What GEM, A-GEM and BCN share: a client remembers samples of each of its tasks. See `GEM` for which."""

    needs: ClassVar[Needs] = Needs(loss=True, samples=True)
    ends_undrawn: ClassVar[bool] = True

    max_size: int | float = argument(0.1, memory_size)  # jsonargparse takes the first type that fits

    def on_download(self, client: Client) -> Memory:
        return {**client.memory, "present": torch.tensor(client.part.experience)}

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if not client.part.drawn and knows_task(client.memory, client.part.experience):
            return client.memory
        return remember_task(client.memory, data, client.part, self.max_size, client.generator)


@dataclass(eq=False)
class GEM(Episodic):
    """Every step: rotates the gradient until it raises the loss of no past task (Lopez-Paz and Ranzato 2017).

    A client remembers samples of each of its tasks (experiences). Their gradients g_i at the present parameters
    constrain the step's gradient g: it becomes the nearest g' with ``<g', g_i> >= 0`` for all past tasks, eq. 11 (see
    `lightning_fcl.methods.projection.project`).

    A task's samples are drawn from its data of the last round that the client took part in (of the experience's last
    round, if it took part in none), in their classes' proportions and at least one of each class where there is room.

    Args:
        max_size: Samples kept of each task: an int is their number, a float a share of the client's data in a round.
        margin: Least weight of each past gradient once one is violated (the authors' memory strength); 0: eq. 11.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.

    Example:
        >>> GEM(max_size=0.1, margin=0.5).margin
        0.5
    """

    margin: float = argument(0.5, at_least, 0)

    def project(self, client: Client, gradient: Tensor, gradient_of: GradientOf) -> Tensor:
        tasks = past_tasks(client.memory)
        if not tasks:
            return gradient
        constraints = gradient.new_empty(len(tasks), len(gradient))
        for row, (x, y) in zip(constraints, tasks, strict=True):
            row.copy_(gradient_of(x, y))
        return project(gradient, constraints, self.margin)


@dataclass(eq=False)
class AGEM(Episodic):
    """Every step: takes from the gradient what raises the mean loss of the past tasks (Chaudhry et al. 2019).

    As `GEM` with a single constraint: the gradient of the samples of all past tasks together, ``g - (g^T g_ref /
    g_ref^T g_ref) g_ref`` where ``g^T g_ref < 0``, eq. 11 (see `lightning_fcl.methods.projection.agem`).

    Args:
        max_size: Samples kept of each task. See `GEM`.
        batch_size: Samples of the reference, drawn anew at each step from torch's global generator, as in the paper;
            None: all that are remembered.

    Raises:
        ValueError: If an argument is out of range, or the module does not state its loss apart.

    Example:
        >>> AGEM(max_size=20, batch_size=256).batch_size
        256
    """

    batch_size: int | None = argument(None, at_least, 1)

    def project(self, client: Client, gradient: Tensor, gradient_of: GradientOf) -> Tensor:
        past = past_samples(client.memory)
        if past is None:
            return gradient
        x, y = past
        if self.batch_size is not None:
            drawn = torch.randperm(len(y))[: self.batch_size].to(y.device)
            x, y = x[drawn], y[drawn]
        return agem(gradient, gradient_of(x, y).to(gradient.dtype))


def past_numbers(memory: Memory) -> list[int]:
    """The numbers of the tasks of which samples are remembered, but the present one's, ascending."""
    numbers = torch.unique(memory["task"]).tolist() if "task" in memory else []
    return [number for number in numbers if number != int(memory["present"])]


def past_tasks(memory: Memory) -> list[tuple[Tensor, Tensor]]:
    """The remembered samples ``(x, y)`` of each task but the present one, in order."""
    chosen = [memory["task"] == number for number in past_numbers(memory)]
    return [(memory["x"][rows], memory["y"][rows]) for rows in chosen]


def past_samples(memory: Memory) -> tuple[Tensor, Tensor] | None:
    """Those of all tasks but the present one together; None where there are none."""
    tasks = past_tasks(memory)
    x, y = ([task[part] for task in tasks] for part in (0, 1))
    return (torch.cat(x), torch.cat(y)) if tasks else None


def remember_task(
    memory: Memory, data: Batch, client_round: ClientRound, max_size: int | float, generator: torch.Generator
) -> Memory:
    """The memory with samples of a client's data, a number or a share of them, in place of the task's earlier ones."""
    x, y = finite_pairs(data)
    size = max_size if isinstance(max_size, int) else max(1, round(max_size * len(y)))
    labels = y.cpu() if y.dim() == 1 and not y.is_floating_point() else torch.zeros(len(y), dtype=torch.long)
    chosen = stratified(labels, size, generator).to(y.device)
    return with_task(memory, {"x": x[chosen], "y": y[chosen]}, client_round.experience)


def finite_pairs(data: Batch) -> tuple[Tensor, Tensor]:
    """A client's samples, if they are pairs; those with numbers that are not finite are left out, with a warning."""
    if not isinstance(data, list | tuple) or len(data) != 2:
        parts = f"{len(data)} parts" if isinstance(data, list | tuple) else type(data).__name__
        raise TypeError(f"Expected samples `[x, y]` to remember but got {parts}. Return pairs instead.")
    x, y = data
    if x.is_floating_point() and not torch.isfinite(x.sum()):
        finite = torch.isfinite(x).flatten(1).all(dim=1)
        bad = int((~finite).sum())
        log.warning("%d of %d samples have numbers that are not finite: they are not remembered.", bad, len(finite))
        x, y = x[finite], y[finite]
    return x, y


def with_task(memory: Memory, samples: Memory, task: int) -> Memory:
    """The memory with samples, ``x``, ``y`` and what is known of each, in place of a task's earlier ones."""
    device = samples["y"].device
    new = {**samples, "task": torch.full((len(samples["y"]),), task, device=device)}
    if "task" in memory:
        kept = memory["task"].to(device) != task
        new = {name: torch.cat([memory[name].to(device)[kept], value]) for name, value in new.items()}
    return {**memory, **new, "present": torch.tensor(task)}


def stratified(y: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Indices of ``size`` samples drawn in their classes' proportions, in order; all samples if there are no more.

    Every class has at least one sample where ``size`` allows it. The rest of each share that is no whole number goes to
    the classes with the largest, by lot where these are equal.
    """
    size = min(size, len(y))
    classes, counts = torch.unique(y, return_counts=True)
    lot = torch.randperm(len(classes), generator=generator)
    classes, shares = classes[lot], counts[lot] * (size / max(len(y), 1))
    least = 1 if size >= len(classes) else 0
    quota = shares.floor().clamp(min=least)
    while (missing := size - int(quota.sum())) != 0:
        if missing > 0:
            quota[(shares - quota).argmax()] += 1
        else:
            quota[torch.where(quota > least, quota - shares, -torch.inf).argmax()] -= 1
    order = torch.randperm(len(y), generator=generator)
    chosen = [order[y[order] == c][: int(n)] for c, n in zip(classes, quota, strict=True)]
    return torch.cat(chosen).sort().values if chosen else order


def balanced(y: Tensor, generator: torch.Generator) -> Tensor:
    """Indices of equally many samples of each class, as many as the rarest has, drawn and in random order."""
    classes, counts = torch.unique(y, return_counts=True)
    order = torch.randperm(len(y), generator=generator)
    chosen = torch.cat([order[y[order] == c][: int(counts.min())] for c in classes])
    return chosen[torch.randperm(len(chosen), generator=generator)]


def knows_task(memory: Memory, task: int) -> bool:
    return "task" in memory and bool((memory["task"] == task).any())
