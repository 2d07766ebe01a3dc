"""Checks of a method's hooks: their names, and the values that they return."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isfunction, signature

from torch import Tensor

from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.methods.base import MethodBase, overrides_hook
from lightning_fcl.validation import did_you_mean, format_names

INVALID_HOOK = "invalid-hook"
"""Code of an error in the code of a method. With other errors, the method may be correct."""

_UPLOADS = ("upload_statistics", "contribute_experience")


def check_hooks(method: MethodBase) -> None:
    """Raise ValueError if a function of a method is named almost like a hook, or if an upload has no server state.

    A function is compared only with the hooks that have the same arguments.
    """
    kind = type(method)
    hooks = {name: list(signature(hook).parameters) for name, hook in vars(MethodBase).items() if isfunction(hook)}
    for name, function in vars(kind).items():
        if name.startswith("_") or not isfunction(function) or hasattr(MethodBase, name):
            continue
        similar = [hook for hook, names in hooks.items() if names == list(signature(function).parameters)]
        if suggestion := did_you_mean(name, similar, cutoff=0.7):
            raise UnknownNameError(
                f"Expected the functions of `{kind.__name__}` to be hooks of `Method`, but `{name}` is not a hook and "
                f"is never called.{suggestion}",
                hint="If the function is not a hook, start its name with an underscore.",
                argument=name,
                code=INVALID_HOOK,
            )
    for hook in _UPLOADS:
        if overrides_hook(method, hook) and not overrides_hook(method, "init_server_state"):
            raise InvalidValueError(
                f"Expected `{kind.__name__}` to override `init_server_state`, because it overrides `{hook}`, which "
                "uploads tensors of the server state.",
                hint="Return the initial value of each uploaded tensor in `init_server_state`.",
                argument="init_server_state",
                code=INVALID_HOOK,
            )


def check_tensors(method: MethodBase, hook: str, value: Mapping[str, Tensor]) -> None:
    """Raise TypeError if a hook did not return tensors by name."""
    if not isinstance(value, Mapping):
        raise InvalidTypeError(
            f"Expected `{type(method).__name__}.{hook}` to return a dict of tensors, but got {_type_name(value)}.",
            hint="Return tensors by name, or {} for no tensors.",
            argument=hook,
            code=INVALID_HOOK,
            value=value,
        )
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise InvalidTypeError(
                f"Expected `{type(method).__name__}.{hook}` to return tensors by name, but got the key {name!r}.",
                argument=hook,
                code=INVALID_HOOK,
                value=name,
            )
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(
                f"Expected `{type(method).__name__}.{hook}` to return a dict of tensors, but the entry `{name}` is "
                f"of type {_type_name(tensor)}.",
                hint="Store numbers with `torch.tensor`, and nested dicts with `with_prefix`.",
                argument=hook,
                code=INVALID_HOOK,
                value=tensor,
            )


def check_shapes(method: MethodBase, hook: str, value: Mapping[str, Tensor], expected: State, owner: str) -> None:
    """Raise TypeError or ValueError if a hook returned tensors with other names or shapes than ``expected``.

    Args:
        method: The method.
        hook: Name of the hook.
        value: The returned value. Some of the expected tensors can be absent.
        expected: Tensors by name.
        owner: Description of ``expected`` for the message.
    """
    check_tensors(method, hook, value)
    for name, tensor in value.items():
        if name not in expected:
            raise UnknownNameError(
                f"Expected `{type(method).__name__}.{hook}` to return tensors of {owner}, but got `{name}`. The names "
                f"are: {format_names(expected, 5) or 'none'}.{did_you_mean(name, expected)}",
                argument=hook,
                code=INVALID_HOOK,
                value=name,
            )
        if tensor.shape != expected[name].shape:
            raise InvalidValueError(
                f"Expected `{type(method).__name__}.{hook}` to return `{name}` in the shape "
                f"{tuple(expected[name].shape)} of {owner}, but got the shape {tuple(tensor.shape)}.",
                argument=hook,
                code=INVALID_HOOK,
                value=tuple(tensor.shape),
            )


def check_transformed(method: MethodBase, value: Mapping[str, Tensor], trained_state: State) -> None:
    """Raise TypeError or ValueError if `transform_upload` did not return all tensors of the client's model."""
    check_shapes(method, "transform_upload", value, trained_state, "the client's model")
    if missing := [name for name in trained_state if name not in value]:
        raise InvalidValueError(
            f"Expected `{type(method).__name__}.transform_upload` to return all tensors of the client's model, but "
            f"`{missing[0]}` is missing.",
            argument="transform_upload",
            code=INVALID_HOOK,
            value=missing[0],
        )


def check_projection(method: MethodBase, projected: Tensor, gradient: Tensor) -> None:
    """Raise TypeError or ValueError if `project_gradient` did not return a vector of the size of the gradient."""
    if not isinstance(projected, Tensor):
        raise InvalidTypeError(
            f"Expected `{type(method).__name__}.project_gradient` to return a tensor, but got {_type_name(projected)}.",
            argument="project_gradient",
            code=INVALID_HOOK,
            value=projected,
        )
    if projected.shape != gradient.shape:
        raise InvalidValueError(
            f"Expected `{type(method).__name__}.project_gradient` to return a gradient of the shape "
            f"{tuple(gradient.shape)}, but got the shape {tuple(projected.shape)}.",
            argument="project_gradient",
            code=INVALID_HOOK,
            value=tuple(projected.shape),
        )


def check_penalty(method: MethodBase, penalty: Tensor | float) -> None:
    """Raise TypeError or ValueError if a method's penalty is not a number or a tensor with one element and no axes."""
    if isinstance(penalty, Tensor) and penalty.ndim:
        raise InvalidValueError(
            f"Expected `{type(method).__name__}.penalty` to return a scalar, but got a tensor of shape "
            f"{tuple(penalty.shape)}.",
            hint="Return `step.mean(values)` for a value per sample, and the sum for a value per parameter.",
            argument="penalty",
            code=INVALID_HOOK,
            value=tuple(penalty.shape),
        )
    if not isinstance(penalty, Tensor | int | float):
        raise InvalidTypeError(
            f"Expected `{type(method).__name__}.penalty` to return a scalar tensor or a number, but got "
            f"{_type_name(penalty)}.",
            hint="Return 0.0 for no penalty.",
            argument="penalty",
            code=INVALID_HOOK,
            value=penalty,
        )


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
