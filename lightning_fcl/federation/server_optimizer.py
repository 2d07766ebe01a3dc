"""Optimizers: creation, conversion of their states to named tensors, and the optimizer of the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.annotations import is_nan, is_number
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import State
from lightning_fcl.federation.client_store import StateSection

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Function that makes an optimizer from parameters."""

SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas"})
"""Settings of an optimizer's parameter groups that are not stored in client states, because schedules change them."""


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter], name: str = "optimizer") -> Optimizer:
    """Return an optimizer of the given parameters.

    Args:
        factory: Function that makes the optimizer.
        parameters: The parameters.
        name: Name of the argument that contains the factory, for messages.

    Raises:
        InvalidValueError: If the factory raises TypeError or ValueError, does not return an optimizer, or uses a
            setting that `check_optimizer` rejects.

    Example:
        >>> make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=-1.0), [nn.Parameter(torch.zeros(1))])
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidValueError: \
Expected `optimizer` to make an optimizer from parameters, but got: Invalid learning rate: -1.0. Correct \
the arguments of the optimizer that `optimizer` makes.
    """
    try:
        optimizer = factory(parameters)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected `{name}` to make an optimizer from parameters, but got: {str(error).rstrip('.')}.",
            hint=f"Correct the arguments of the optimizer that `{name}` makes.",
            argument=name,
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise InvalidValueError(
            f"Expected `{name}` to make a `torch.optim.Optimizer`, but got {type(optimizer).__name__}.", argument=name
        )
    check_optimizer(optimizer)
    return optimizer


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if a setting of an optimizer is NaN, or a learning rate is infinite.

    Example:
        >>> check_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=float("nan")))
        Traceback (most recent call last):
        lightning_fcl.errors.InvalidValueError: \
Expected `lr` of `SGD` to be a finite number, but got nan. Use a finite number, such as `lr=0.01`.
    """
    for values in group_values(optimizer):
        for name, value in values.items():
            if is_nan(value) or (name == "lr" and is_number(value) and not math.isfinite(value)):
                number = 0.01 if name == "lr" else optimizer.defaults.get(name)
                usable = 0.0 if number is None or is_nan(number) else number
                is_sequence = isinstance(value, list | tuple)
                condition = "contain only finite numbers" if is_sequence else "be a finite number"
                raise InvalidValueError(
                    f"Expected `{name}` of `{type(optimizer).__name__}` to {condition}, but got {value}.",
                    hint=f"Use {'finite numbers' if is_sequence else 'a finite number'}, such as `{name}={usable}`.",
                    argument=name,
                    value=value,
                )


def get_settings(optimizer_or_schedule: Optimizer | LRScheduler) -> dict[str, Any]:
    """Return the class name and the plain settings (`is_plain`) of an optimizer or a schedule, for checkpoints.

    The values of an optimizer's settings are lists with one value for each parameter group.

    Example:
        >>> get_settings(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5))["lr"]
        [0.5]
    """
    if isinstance(optimizer_or_schedule, Optimizer):
        names = dict.fromkeys(
            name for group in optimizer_or_schedule.param_groups for name in group if name != "params"
        )
        settings = {name: [group.get(name) for group in optimizer_or_schedule.param_groups] for name in names}
    else:
        settings = optimizer_or_schedule.state_dict()
    return {
        "class": type(optimizer_or_schedule).__name__,
        **{name: value for name, value in settings.items() if is_plain(value)},
    }


def is_plain(value: object) -> bool:
    """Return whether a value is None, a number, a string, or a list of such values."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's parameter groups, without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def set_group_values(optimizer: Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """Replace the settings of an optimizer's parameter groups. The groups keep their parameters."""
    for group, new_values in zip(optimizer.param_groups, values, strict=True):
        for name in group.keys() - new_values.keys() - {"params"}:
            del group[name]
        group.update(new_values)


def optimizer_state(optimizer: Optimizer, initial_settings: Sequence[Mapping[str, Any]] = ()) -> StateSection:
    """Return an optimizer's state as a flat dict of tensors.

    Args:
        optimizer: The optimizer.
        initial_settings: The `group_values` of the new optimizer. A setting that has changed since then is part of the
            result, unless schedules change it (see `SCHEDULED`).

    Returns:
        Tensors with the keys ``"<index of the parameter>.<name>"`` and ``"group.<index of the group>.<name>"``. If a
        changed setting is a Python number, the key starts with ``"number"`` in place of ``"group"``.

    Raises:
        InvalidValueError: If the state contains a value that is neither a tensor nor a number.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {f"{i}.{name}": v for i, p in enumerate(parameters) for name, v in optimizer.state.get(p, {}).items()}
    for i, (group, fresh) in enumerate(zip(group_values(optimizer), initial_settings, strict=False)):
        for name in group.keys() - SCHEDULED:
            if not _equal(group[name], fresh.get(name)):
                state[f"{'group' if isinstance(group[name], Tensor) else 'number'}.{i}.{name}"] = group[name]
    for key, value in state.items():
        if not isinstance(value, Tensor | int | float):
            raise InvalidValueError(
                "Expected an optimizer that keeps tensors and numbers for `keep_optimizer_state=True`, but "
                f"`{type(optimizer).__name__}` keeps `{key}` of type {type(value).__name__}.",
                hint="Remove `keep_optimizer_state`.",
                argument="keep_optimizer_state",
                value=type(optimizer).__name__,
            )
    numeric_state = {
        key: torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else v for key, v in state.items()
    }
    return {key: torch.as_tensor(value).detach().clone() for key, value in numeric_state.items()}


def _equal(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def load_optimizer_state(optimizer: Optimizer, state: StateSection) -> None:
    """Load a state into a new optimizer in place. ``state`` is the result of `optimizer_state`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in state.items():
        prefix, rest = key.split(".", 1)
        if prefix.isdigit():
            optimizer.state[parameters[int(prefix)]][rest] = value.clone()
        else:
            group, name = rest.split(".", 1)
            optimizer.param_groups[int(group)][name] = value.clone() if prefix == "group" else value.item()


def with_parameters(optimizer: Optimizer, twins: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a new optimizer with equal settings. ``twins`` maps the `id` of each old parameter to the new parameter.

    Parameters that are not in ``twins`` are left out.
    """
    groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)  # type: ignore[call-arg]


class ServerOptimizer:
    """The optimizer of the server: a `torch.optim` optimizer on the pseudo-gradient (Reddi et al., 2021).

    The pseudo-gradient is the server state minus the aggregate. ``SGD(lr=1)`` is FedAvg, ``SGD(lr=1, momentum=.9)`` is
    FedAvgM, and ``Adam`` is FedAdam. For entries that are not in ``names``, such as buffers, the aggregate is the new
    server value.

    Args:
        factory: Function that makes the optimizer from a list of parameters.
        names: Names of the parameters that the optimizer steps.

    Example:
        >>> import torch
        >>> optimizer = ServerOptimizer(lambda params: torch.optim.SGD(params, lr=0.5), names=["w"])
        >>> optimizer.step(server={"w": torch.tensor([1.0])}, aggregate={"w": torch.tensor([3.0])})
        {'w': tensor([2.])}
    """

    citations: ClassVar[tuple[str, ...]] = ("reddi2021fedopt",)

    def __init__(self, factory: OptimizerFactory, names: list[str]) -> None:
        self._factory = factory
        self._names = names
        self._optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._pending: dict[str, object] | None = None

    def step(self, server: Mapping[str, Tensor], aggregate: Mapping[str, Tensor]) -> State:
        """Return the server state after one optimizer step with the pseudo-gradient ``server - aggregate``."""
        if self._optimizer is None:
            self._parameters = [nn.Parameter(server[name].clone()) for name in self._names]
            self._optimizer = make_optimizer(self._factory, self._parameters, "server_optimizer")
            if self._pending is not None:
                self._optimizer.load_state_dict(self._pending)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.data.copy_(server[name])
            parameter.grad = (server[name] - aggregate[name]).to(parameter.dtype)
        self._optimizer.step()
        updated_parameters = {name: p.detach().clone() for name, p in zip(self._names, self._parameters, strict=True)}
        return {**aggregate, **updated_parameters}

    def state_dict(self) -> dict[str, object]:
        """Return the optimizer's state, for checkpoints. Before the first step, return the loaded state or {}."""
        return self._optimizer.state_dict() if self._optimizer is not None else self._pending or {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Set the state of an earlier run. The next step loads this state into a new optimizer."""
        self._optimizer = None
        self._pending = state or None
