"""BCN: rehearsal as a game between the worst inputs and the parameters that suit all tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.episodic import Episodic, past_samples, past_tasks
from lightning_fcl.methods.step import Step


def worst_inputs(x: Tensor, gradient: Callable[[Tensor], Tensor], eps: float, steps: int) -> Tensor:
    """Inputs near ``x`` on which a loss is higher, by normalised gradient ascent (the first player).

    A step has the length ``eps``, by the norm over the channels; what is then farther from ``x`` comes back as far.
    """
    moved = x
    for _ in range(steps):
        change = moved + eps * F.normalize(gradient(moved), dim=1) - x
        moved = x + change * (eps / change.norm(dim=1, keepdim=True).clamp(min=eps))
    return moved


def descended(
    params: Mapping[str, Tensor], gradient: Callable[[State], Sequence[Tensor]], rate: float, steps: int
) -> State:
    """Parameters after some steps of plain gradient descent, and apart from the graph (the second player)."""
    state = {name: value.detach() for name, value in params.items()}
    for _ in range(steps):
        state = {n: value - rate * g for (n, value), g in zip(state.items(), gradient(state), strict=True)}
    return state


@dataclass(eq=False)
class BCN(Episodic):
    """Every step: rehearses, against the worst inputs and for the parameters that fit all tasks best.

    Balanced continual learning (Raghavan and Balaprakash 2021, section 3; BCN in Zuo et al. 2024). From a client's
    second task on a step's loss is

    ``beta * J_new + J_PN + (J_PN(x + delta) - J_PN) + (J_PN(theta_B) - J_PN)``

    J_new is the task loss on the batch, J_PN that on samples drawn anew at each step, with replacement and from torch's
    global generator, among the remembered ones of past tasks and the batch's. The first bracket is generalisation:
    delta makes the loss of these samples as high as `worst_inputs` can. The second is forgetting: theta_B is where
    `descended` takes a copy of the parameters on the same samples. Gradients do not go through the players' moves.

    It differs from the authors' code in three things. There the copy theta_B is cut off the graph; here the gradient at
    theta_B counts, to first order. There the first of the ``x_steps`` does not move, and nothing holds within ``eps``.
    And there a batch is trained on kappa times over (3 with MNIST): use more local epochs. The defaults are those for
    MNIST; for CIFAR-100 they are ``eps=0.001, x_steps=1, theta_steps=1, inner_lr=1e-5``. A step costs ``4 + x_steps +
    theta_steps`` passes in place of one.

    Args:
        max_size: Samples kept of each task. See `GEM`.
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

    beta: float = argument(0.99, at_least, 0)
    eps: float = argument(0.1, at_least, 0)
    x_steps: int = argument(2, at_least, 0)
    theta_steps: int = argument(5, at_least, 0)
    inner_lr: float = argument(0.001, above, 0)
    batch_size: int = argument(128, at_least, 1)

    def task_weight(self, client: Client) -> float:
        return self.beta if past_tasks(client.memory) else 1.0

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        past = past_samples(client.memory)
        if past is None:
            return 0.0
        assert step.y is not None  # as it needs labels
        pool = [torch.cat([old.to(new.device), new]) for old, new in zip(past, (step.x, step.y), strict=True)]
        drawn = torch.randint(len(pool[1]), (self.batch_size,))
        x, y = (part[drawn.to(part.device)] for part in pool)
        total = present = step.loss_of(x, y)
        if self.eps > 0 and self.x_steps > 0:
            total = total + step.loss_of(self._worst(step, x, y), y) - present
        if self.theta_steps > 0:
            total = total + step.loss_of(x, y, self._balanced(step, x, y)) - present
        return total

    def _worst(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(
                f"Expected inputs of floating-point numbers, which `BCN` can move, but got {x.dtype}. Give it `eps=0`."
            )
        fixed = {name: value.detach() for name, value in step.params.items()}

        def gradient(moved: Tensor) -> Tensor:
            moved = moved.detach().requires_grad_()
            return torch.autograd.grad(step.loss_of(moved, y, fixed), moved)[0]

        return worst_inputs(x, gradient, self.eps, self.x_steps)

    def _balanced(self, step: Step, x: Tensor, y: Tensor) -> State:
        """The second player's parameters, whose gradient is that of the present ones."""

        def gradient(state: State) -> Sequence[Tensor]:
            leaves = {name: value.detach().requires_grad_() for name, value in state.items()}
            return torch.autograd.grad(step.loss_of(x, y, leaves), list(leaves.values()), materialize_grads=True)

        moved = descended(step.params, gradient, self.inner_lr, self.theta_steps)
        return {name: value + (moved[name] - value).detach() for name, value in step.params.items()}
