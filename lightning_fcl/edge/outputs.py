"""Outputs of modules that return several tensors: their names, order and differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.validation import format_code_names

if TYPE_CHECKING:
    from onnx import GraphProto


def iter_leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values in nested dicts, lists, tuples, named tuples and dataclasses, with their paths.

    A path consists of dict keys, field names and positions. Values of None are left out.

    Example:
        >>> [path for path, _ in iter_leaves({"logits": 1, "states": (2, None, 3)})]
        [('logits',), ('states', '0'), ('states', '2')]
    """
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(one.name, getattr(value, one.name)) for one in fields(value)]
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = [(str(name), item) for name, item in zip(names, value, strict=True)]
    else:
        if value is not None:
            yield path, value
        return
    for name, item in parts:
        yield from iter_leaves(item, (*path, name))


def get_outputs(value: object) -> dict[str, Tensor]:
    """Return the tensors that a module returned, by name, in the order of the returned value.

    A single tensor has the name ``output``. Other names are the keys, field names and positions on the path to the
    tensor, joined by ``_``. A name that would start with a position starts with ``output_``.

    Raises:
        InvalidTypeError: If the module returned no tensor, a value that is not a tensor, or a tensor of complex or
            bfloat16 numbers.
        InvalidValueError: If two tensors have the same name.

    Example:
        >>> x = torch.zeros(1)
        >>> [*get_outputs((x, {"mask": x}))], [*get_outputs({"logits": x, "states": [x, x]})]
        (['output_0', 'output_1_mask'], ['logits', 'states_0', 'states_1'])
    """
    outputs: dict[str, Tensor] = {}
    for path, leaf in iter_leaves(value):
        name = "_".join(path)
        name = name if name[:1].isalpha() else f"output_{name}" if path else "output"
        if not isinstance(leaf, Tensor):
            raise InvalidTypeError(
                "Expected `forward` to return tensors, or dicts, lists, tuples, named tuples or dataclasses of "
                f"tensors, but `{name}` is of type `{type(leaf).__name__}`.",
                hint="Wrap the module in a module that returns only tensors.",
                argument="module",
                value=type(leaf).__name__,
            )
        if leaf.is_complex() or leaf.dtype == torch.bfloat16:
            raise InvalidTypeError(
                f"Expected outputs of types that runtimes return, but `{name}` has the type {leaf.dtype}.",
                hint="Return `output.float()`, or `torch.view_as_real(output)` for complex numbers.",
                argument="module",
                value=leaf.dtype,
            )
        if name in outputs:
            raise InvalidValueError(
                f"Expected outputs with different names, but two outputs have the name `{name}`.",
                hint="Rename one of the keys or fields that `forward` returns.",
                argument="module",
                value=name,
            )
        outputs[name] = leaf
    if not outputs:
        raise InvalidTypeError(
            f"Expected `forward` to return at least one tensor, but got a `{type(value).__name__}` without tensors.",
            hint="Wrap the module in a module that returns only tensors.",
            argument="module",
            value=type(value).__name__,
        )
    return outputs


class OutputTuple(nn.Module):
    """Wrapper that returns the outputs of a module as a tuple, in the order of `get_outputs`.

    Example:
        >>> [tuple(output.shape) for output in OutputTuple(nn.LSTM(3, 2))(torch.zeros(5, 4, 3))]
        [(5, 4, 2), (1, 4, 2), (1, 4, 2)]
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the module."""
        return tuple(get_outputs(self.module(x)).values())


def check_output_names(names: Sequence[str] | None, outputs: Mapping[str, Tensor], reserved: str) -> list[str]:
    """Return the names of the outputs in a file: the given names, or the names of ``outputs``.

    Args:
        names: Names for the outputs, in their order. None: the names of ``outputs``.
        outputs: The outputs by name.
        reserved: Name of the input, which no output can have.

    Raises:
        InvalidValueError: If the number of names is wrong, or names are empty, equal, or equal to ``reserved``.
    """
    file_names = [*outputs] if names is None or isinstance(names, str) else [*names]
    if (
        isinstance(names, str)
        or len(file_names) != len(outputs)
        or len({*file_names, "", reserved}) != len(file_names) + 2
    ):
        valid_names = [f"{name}_output" if name == reserved else name for name in outputs]
        raise InvalidValueError(
            f"Expected `output_names` to be {len(outputs)} different names other than `{reserved}`, for the outputs "
            f"{format_code_names(outputs)}, but got {names if names is not None else file_names}.",
            hint=f"Pass for example `output_names={valid_names}`, or `--output-names {','.join(valid_names)}`.",
            argument="output_names",
            value=names,
        )
    return file_names


def rename_values(graph: GraphProto, new_names: Mapping[str, str]) -> None:
    """Rename the values of an ONNX graph and of its subgraphs in place.

    Args:
        graph: The graph.
        new_names: The new name of each value to rename. Each new name must be unused, or renamed as well.
    """
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = new_names.get(value.name, value.name)
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [new_names.get(name, name) for name in values]
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                rename_values(subgraph, new_names)


def largest_difference(expected: Tensor, computed: Tensor) -> float:
    """Return the largest absolute difference. Infinity if shapes or dtypes differ. Equal infinities do not differ.

    Example:
        >>> largest_difference(torch.tensor([1.0, -torch.inf]), torch.tensor([1.5, -torch.inf]))
        0.5
    """
    if expected.shape != computed.shape or expected.dtype != computed.dtype:
        return math.inf
    expected = expected.detach()
    differences = (expected.double() - computed.double()).abs()
    return float(differences.where(expected != computed, 0.0).max()) if differences.numel() else 0.0
