"""Optimizers: made from parameters, their state as a flat dict of tensors, and the same one for other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.federation.client_store import Memory

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer from parameters."""


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter], name: str = "optimizer") -> Optimizer:
    """An optimizer of these parameters.

    Args:
        factory: Makes it.
        parameters: The parameters.
        name: The argument that the factory was given as, for messages.

    Raises:
        ValueError: If it makes none, or refuses its arguments.

    Example:
        >>> make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=-1.0), [nn.Parameter(torch.zeros(1))])
        Traceback (most recent call last):
        ValueError: Expected `optimizer` to make one from parameters but got: Invalid learning rate: -1.0. Mend its \
arguments.
    """
    try:
        made = factory(parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected `{name}` to make one from parameters but got: {str(error).rstrip('.')}. Mend its arguments."
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(f"Expected `{name}` to make a `torch.optim.Optimizer` but got {type(made).__name__}.")
    return made


def settings_of(made: Optimizer | LRScheduler) -> dict[str, Any]:
    """The settings with which an optimizer or a schedule begins, as far as they are plain values, for checkpoints.

    Example:
        >>> settings_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5))["lr"]
        [0.5]
    """
    if isinstance(made, Optimizer):
        names = dict.fromkeys(name for group in made.param_groups for name in group if name != "params")
        told = {name: [group.get(name) for group in made.param_groups] for name in names}
    else:
        told = made.state_dict()
    return {"class": type(made).__name__, **{name: value for name, value in told.items() if _is_plain(value)}}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def optimizer_memory(optimizer: Optimizer) -> Memory:
    """An optimizer's state as a flat dict of tensors: ``"<parameter number>.<name>"``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{name}": torch.as_tensor(value).detach().clone()
        for i, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
    }


def restore_optimizer(optimizer: Optimizer, memory: Memory) -> None:
    """Give an optimizer the state that `optimizer_memory` took."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in memory.items():
        number, name = key.split(".", 1)
        optimizer.state[parameters[int(number)]][name] = value.clone()


def with_parameters(optimizer: Optimizer, twins: Mapping[int, nn.Parameter]) -> Optimizer:
    """The same optimizer for other parameters: ``twins`` by the `id` of those that they stand for."""
    groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)  # type: ignore[call-arg]
