"""GEM and A-GEM: samples of past tasks do not join the batch, they hold back what a step would undo."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fcl.errors import argument, at_least
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.episodic import Episodic, past_tasks
from lightning_fcl.methods.functional import GradientOf
from lightning_fcl.methods.projection import agem, project


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
        tasks = past_tasks(client.memory)
        if not tasks:
            return gradient
        x, y = (torch.cat(column) for column in zip(*tasks, strict=True))
        if self.batch_size is not None:
            drawn = torch.randperm(len(y))[: self.batch_size].to(y.device)
            x, y = x[drawn], y[drawn]
        return agem(gradient, gradient_of(x, y).to(gradient.dtype))
