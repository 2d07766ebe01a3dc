"""What goes over the wire: plain values and arrays of numbers, checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import State

BYTES = 256 * 2**20
"""Bytes that the arrays of a parcel may have where nothing else was agreed."""


class RefusedError(ValueError):
    """One side of a deployment does not go on with what the other has sent."""


@dataclass(frozen=True)
class Parcel:
    """A message between server and node.

    Args:
        head: Plain values, as JSON has them.
        state: Tensors by name.

    Example:
        >>> Parcel({"kind": "train"}, {"w": torch.zeros(3)}).nbytes
        12
    """

    head: Mapping[str, Any]
    state: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(value.nbytes for value in self.state.values())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The tensors as arrays; types that NumPy has not travel as their bytes, which `of_arrays` undoes."""
        return {name: _array(value) for name, value in self.state.items()}

    def text(self) -> str:
        """The head, and the types of the tensors, as JSON."""
        types = {name: str(value.dtype).removeprefix("torch.") for name, value in self.state.items()}
        return json.dumps({"head": dict(self.head), "types": types})

    @classmethod
    def of_arrays(cls, text: str, arrays: Mapping[str, NDArray[Any]]) -> Parcel:
        """The parcel that has this text and these arrays.

        Raises:
            RefusedError: If they do not belong together.

        Example:
            >>> sent = Parcel({"round": 1}, {"w": torch.ones(2, dtype=torch.bfloat16)})
            >>> Parcel.of_arrays(sent.text(), sent.arrays()).state["w"]
            tensor([1., 1.], dtype=torch.bfloat16)
        """
        try:
            said = json.loads(text)
            head, types = dict(said["head"]), dict(said["types"])
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(f"Expected a message of lightning-fcl but got {text[:80]!r}.") from error
        if types.keys() != arrays.keys():
            raise RefusedError(f"Expected the arrays {sorted(types)[:5]} of the message but got {sorted(arrays)[:5]}.")
        return cls(head, {name: _tensor(name, array, types[name]) for name, array in arrays.items()})


def _array(value: Tensor) -> NDArray[Any]:
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        value = value.view(torch.int16)
    array: NDArray[Any] = value.numpy()
    return array


def _tensor(name: str, array: NDArray[Any], dtype: object) -> Tensor:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(kind, torch.dtype) or array.dtype.kind not in "biufc":
        raise RefusedError(f"Expected `{name}` to be numbers but got {array.dtype}, called {dtype!r}.")
    value = torch.from_numpy(np.array(array))  # a copy: what arrives may be read-only
    value = value.view(torch.bfloat16) if kind == torch.bfloat16 and value.dtype == torch.int16 else value
    if value.dtype != kind:
        raise RefusedError(f"Expected `{name}` to be {dtype} but got {array.dtype}.")
    return value


def check_same(head: Mapping[str, Any], recipe: str, sender: str) -> None:
    """Refuse a message of another version of the library, or of another recipe.

    Args:
        head: The message's head.
        recipe: The fingerprint of the recipe here.
        sender: Who has sent it, for the error.

    Raises:
        RefusedError: If it is.

    Example:
        >>> check_same({"version": "0.0.1", "recipe": "ab"}, "ab", "the server")
        Traceback (most recent call last):
        lightning_fcl.deployment.parcel.RefusedError: Expected the server to run lightning-fcl ... but it runs 0.0.1...
    """
    if head.get("version") != __version__:
        raise RefusedError(
            f"Expected {sender} to run lightning-fcl {__version__} but it runs {head.get('version')}: what they "
            "compute may differ. Install one version everywhere."
        )
    if head.get("recipe") != recipe:
        raise RefusedError(
            f"Expected {sender} to have the recipe {recipe} but it has {head.get('recipe')}. Deploy one recipe "
            "everywhere."
        )


def check_entries(state: Mapping[str, Tensor], known: Mapping[str, Tensor], sender: str, finite: bool = True) -> None:
    """Refuse a state that is not of these entries.

    Args:
        state: What has come.
        known: Entries of the names, shapes and types that are expected.
        sender: Who has sent it, for the error.
        finite: Whether numbers that are not finite are refused, too, where the known ones are finite.

    Raises:
        RefusedError: If a name, a shape or a type is another one, or numbers are not finite.

    Example:
        >>> check_entries({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "client a")
        Traceback (most recent call last):
        lightning_fcl.deployment.parcel.RefusedError: Expected `w` of client a to be torch.float32 of shape (3,) ...
    """
    strange = sorted(state.keys() ^ known.keys())
    if strange:
        raise RefusedError(
            f"Expected {sender} to send the {len(known)} entries of this recipe's model but {quoted(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} missing or not among them. Deploy one recipe everywhere."
        )
    for name, value in state.items():
        wanted = known[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise RefusedError(
                f"Expected `{name}` of {sender} to be {wanted.dtype} of shape {tuple(wanted.shape)} but got "
                f"{value.dtype} of shape {tuple(value.shape)}. Deploy one recipe everywhere."
            )
        if finite and not torch.isfinite(value).all() and torch.isfinite(wanted).all():
            raise RefusedError(f"Expected `{name}` of {sender} to be finite but some of its numbers are not.")


def check_size(parcel: Parcel, limit: int, sender: str) -> None:
    """Refuse a parcel that is larger than agreed.

    Raises:
        RefusedError: If it is.

    Example:
        >>> check_size(Parcel({}, {"w": torch.zeros(3)}), 8, "client a")
        Traceback (most recent call last):
        lightning_fcl.deployment.parcel.RefusedError: Expected at most 8 bytes of client a but got 12. ...
    """
    if parcel.nbytes > limit:
        raise RefusedError(
            f"Expected at most {limit} bytes of {sender} but got {parcel.nbytes}. Raise `message-bytes` of the run's "
            "configuration if the model is that large."
        )
