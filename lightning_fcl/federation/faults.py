"""Numbers that are not finite, or far from those before: which clients send such, and whether the server has some."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fcl.errors import quoted
from lightning_fcl.federation.exact import CohortSums
from lightning_fcl.federation.reductions import Reduction, State


def find_faults(
    states: Mapping[str, Tensor], start: State, reductions: Mapping[str, Reduction], sums: CohortSums
) -> tuple[dict[int, list[str]], list[str]]:
    """The clients, by number, with entries that are not finite among those that they send or go on from.

    Numbers that are not finite with the server are no fault of a client's: the entries that have such come second.

    Args:
        states: The clients' states, every entry of shape (clients, ...).
        start: What they began with.
        sums: What some entries of all clients come to.
    """
    numbers = {
        name: value
        for name, value in states.items()
        if (reductions[name].up or reductions[name].own) and (value.is_floating_point() or value.is_complex())
    }
    # A sum that is finite has finite terms; only where one is not must every number be looked at. Rows that are one in
    # memory are looked at once.
    once = {name: value[0] if value.stride(0) == 0 else value for name, value in numbers.items()}
    once |= {name: value for name, (value, _) in sums.items()}
    if all(cmath.isfinite(value.sum().item()) for value in once.values()):
        return {}, []
    begun = {n: torch.isfinite(start[n]) for n, v in numbers.items() if start[n].shape == v.shape[1:]}
    odd = [name for name, sound in begun.items() if reductions[name].up and not sound.all()]
    sound = {n: torch.isfinite(v) | ~begun[n] if n in begun else torch.isfinite(v) for n, v in numbers.items()}
    finite = {name: value.view(*value.shape, 1).flatten(1).all(dim=1).tolist() for name, value in sound.items()}
    rows = range(len(next(iter(finite.values()))))
    faults = {row: [name for name, fine in finite.items() if not fine[row]] for row in rows}
    return {row: names for row, names in faults.items() if names}, odd


def check_finite(state: Mapping[str, Tensor], names: Sequence[str], when: str) -> None:
    """Refuse a state with which every client would diverge: one with learnt numbers that are not finite."""
    wrong = [name for name in names if not torch.isfinite(state[name].sum())]
    wrong = [name for name in wrong if not torch.isfinite(state[name]).all()]
    if wrong:
        raise ValueError(f"Expected a server state of finite numbers but {quoted(wrong)} is not finite {when}.")


def check_still_finite(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse what a round's uploads come to if it is not finite where the server was: before anybody keeps it."""
    odd = [name for name, value in after.items() if value is not before[name] and not torch.isfinite(value.sum())]
    when = "when a round's uploads have come together. Go on from the checkpoint before it, with other reductions"
    check_finite(after, [name for name in odd if torch.isfinite(before[name]).all()], when)


def change_of(before: Tensor, after: Tensor) -> float:
    """The sum of the squares by which numbers have changed, where they are finite on both sides."""
    wide = torch.complex128 if after.is_complex() else torch.float64
    sound = (after != before) & torch.isfinite(before) & torch.isfinite(after)
    return float((after.to(wide) - before.to(wide)).where(sound, 0).abs().square().sum())


def times_moved(changes: Mapping[str, float], before: Mapping[str, Tensor]) -> float:
    """How far entries have moved together, by `change_of` each: so many times the larger of their norm before and 1."""
    size = sum(float(before[n].double().where(torch.isfinite(before[n]), 0).square().sum()) for n in changes)
    return math.sqrt(sum(changes.values())) / max(math.sqrt(size), 1.0)


def check_moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Sequence[str], most: float) -> None:
    """Refuse what a round comes to if it is further from the server than so many times the larger of its norm and 1."""
    same = [name for name in names if before[name].shape == after[name].shape]
    times = times_moved({name: change_of(before[name], after[name]) for name in same}, before)
    if not times <= most:
        raise ValueError(
            f"Expected a round to move the server by at most {most:g} times the larger of its norm and 1 but it would "
            f"by {times:.3g} times. Go on from the checkpoint before it, with other reductions, a lower learning rate "
            "of `server_optimizer`, or a larger `largest-update` of the run's configuration."
        )
