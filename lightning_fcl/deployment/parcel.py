"""What goes over the wire: plain values and arrays of numbers, as they are sent; `decoding` reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import State

BYTES = 256 * 2**20
"""Bytes that the arrays of a parcel may have where nothing else was agreed."""

MODEL, SERVER = "model/", "server/"
"""What names of tensors begin with: of the model, and of what a server keeps for methods."""


class RefusedError(ValueError):
    """One side of a deployment does not go on with what the other has sent."""


@dataclass(frozen=True)
class Parcel:
    """A message between server and node."""

    head: Mapping[str, Any]
    state: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.state.values())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The tensors as arrays; types that NumPy has not travel as their bytes."""
        return {name: _array(value) for name, value in self.state.items()}

    def text(self) -> str:
        """The head, and the types of the tensors, as JSON."""
        types = {name: str(value.dtype).removeprefix("torch.") for name, value in self.state.items()}
        return json.dumps({"head": dict(self.head), "types": types})


def _array(value: Tensor) -> NDArray[Any]:
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        value = value.view(torch.int16)
    array: NDArray[Any] = value.numpy()
    return array


def digest(state: Mapping[str, Tensor]) -> str:
    """A short name of a state: another one has another name."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def check_same(head: Mapping[str, Any], recipe: str, sender: str) -> None:
    """Refuse a message of another version of the library, or of another recipe."""
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


def check_names(sent: Iterable[str], wanted: Iterable[str], entries: int, sender: str) -> None:
    """Refuse what is not sent under the names that are wanted of so many entries."""
    strange = sorted({*sent} ^ {*wanted})
    if strange:
        raise RefusedError(
            f"Expected {sender} to send the {entries} entries of this recipe's model but {quoted(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} missing or not among them. Deploy one recipe everywhere."
        )


def check_entries(state: Mapping[str, Tensor], known: Mapping[str, Tensor], sender: str) -> None:
    """Refuse a state that is not of these entries, or not finite where they are."""
    check_names(state, known, len(known), sender)
    for name, value in state.items():
        check_form(name, value, known[name], sender)
        if not torch.isfinite(value).all() and torch.isfinite(known[name]).all():
            raise RefusedError(f"Expected `{name}` of {sender} to be finite but some of its numbers are not.")


def check_form(name: str, value: Tensor, wanted: Tensor, sender: str) -> None:
    """Refuse an entry of another type or shape."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise RefusedError(
            f"Expected `{name}` of {sender} to be {wanted.dtype} of shape {tuple(wanted.shape)} but got "
            f"{value.dtype} of shape {tuple(value.shape)}. Deploy one recipe everywhere."
        )
