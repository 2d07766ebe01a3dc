"""Uploads as what has changed: a bit for each number, and the numbers that are others than those the client got."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.deployment.parcel import RefusedError
from lightning_fcl.federation.aggregation import State

CHANGED, VALUES = "|changed", "|values"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(state: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> State:
    """A state with entries of which little has changed in fewer bytes.

    Args:
        start: What the receiver has, by name; entries of other names or shapes are sent as they are.
    """
    found: State = {}
    for name, value in state.items():
        known = start.get(name)
        value = value.detach().contiguous()
        if known is None or known.shape != value.shape or known.dtype != value.dtype or value.is_complex():
            found[name] = value
            continue
        changed = (_bits(value) != _bits(known.to(value.device))).flatten()
        values, mask = value.flatten()[changed], np.packbits(changed.cpu().numpy(), bitorder="little")
        parts = {name + CHANGED: torch.from_numpy(mask), name + VALUES: values}
        found |= parts if values.nbytes + mask.nbytes < value.nbytes else {name: value}
    return found


def restored(sent: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> State:
    """The state of which `changes` has made what was sent."""
    found: State = {}
    for name, value in sent.items():
        if name.endswith(VALUES):
            continue
        if not name.endswith(CHANGED):
            found[name] = value
            continue
        plain = name.removesuffix(CHANGED)
        known, values = start.get(plain), sent.get(plain + VALUES)
        if known is None or values is None:
            raise RefusedError(
                f"Expected all that has changed of `{plain}`, which was sent to clients, but got a part."
            )
        size = known.numel()
        fits = value.dtype == torch.uint8 and value.shape == (-(-size // 8),) and values.dtype == known.dtype
        flags = np.unpackbits(value.numpy(), count=size, bitorder="little") if fits else np.empty(0, np.uint8)
        if not fits or values.shape != (flags.sum(),):
            raise RefusedError(f"Expected what has changed of `{plain}` to fit its {size} numbers.")
        changed = torch.from_numpy(flags).bool()
        whole = known.detach().cpu().flatten().clone()
        whole[changed] = values
        found[plain] = whole.view(known.shape)
    return found


def _bits(value: Tensor) -> Tensor:
    """Numbers by their bits: 0 and -0 differ, and a NaN is itself."""
    return value.contiguous().view(_BITS[value.element_size()])
