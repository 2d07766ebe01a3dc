"""What methods remember of a client's tasks: samples of each, in a client's memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import argument
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs

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
        return at_task(client.memory, client.part)

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if not client.part.drawn and knows_task(client.memory, client.part.experience):
            return client.memory
        return remember_task(client.memory, data, client.part, self.max_size, client.generator)


def past_tasks(memory: Memory) -> list[tuple[Tensor, Tensor]]:
    """The remembered samples ``(x, y)`` of each task but the present one, in order."""
    if "task" not in memory:
        return []
    numbers = torch.unique(memory["task"]).tolist()
    chosen = [memory["task"] == number for number in numbers if number != int(memory["present"])]
    return [(memory["x"][rows], memory["y"][rows]) for rows in chosen]


def remember_task(
    memory: Memory, data: Batch, client_round: ClientRound, max_size: int | float, generator: torch.Generator
) -> Memory:
    """The memory with samples of a client's data, a number or a share of them, in place of the task's earlier ones."""
    x, y = labelled(data)
    size = max_size if isinstance(max_size, int) else max(1, round(max_size * len(y)))
    labels = y.cpu() if y.dim() == 1 and not y.is_floating_point() else torch.zeros(len(y), dtype=torch.long)
    chosen = stratified(labels, size, generator).to(y.device)
    return with_task(memory, x[chosen], y[chosen], client_round.experience)


def labelled(data: Batch) -> tuple[Tensor, Tensor]:
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


def with_task(memory: Memory, x: Tensor, y: Tensor, task: int) -> Memory:
    """The memory with samples in place of a task's earlier ones. See `remember_task`."""
    new = {"x": x, "y": y, "task": torch.full((len(y),), task, device=y.device)}
    if "task" in memory:
        old = {name: memory[name].to(y.device) for name in new}
        kept = old["task"] != task
        new = {name: torch.cat([old[name][kept], value]) for name, value in new.items()}
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


def at_task(memory: Memory, client_round: ClientRound) -> Memory:
    """The memory of a client that now learns the task of ``client_round``."""
    return {**memory, "present": torch.tensor(client_round.experience)}


def knows_task(memory: Memory, task: int) -> bool:
    return "task" in memory and bool((memory["task"] == task).any())
