"""Our numbers against a paper's, cell by cell: how many are near."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_fcl.evaluation.table import Cell, Table

NEAR = 0.05
"""How far from the paper's number a mean is near it."""


class Standing(NamedTuple):
    """How many numbers of a table are near the paper's, otherwise within two standard deviations, or outside."""

    near: int
    spread: int
    outside: int

    @property
    def verdict(self) -> str:
        """Reproduced if at most a tenth lies outside, not if more than half does."""
        if not sum(self):
            return "not compared"
        share = self.outside / sum(self)
        return "reproduced" if share <= 0.1 else "not reproduced" if share > 0.5 else "partly reproduced"


def distance_to_paper(cell: Cell) -> float:
    """How far a mean is from the paper's number, both as printed, to three digits; infinite if one is not there."""
    if cell.mean is None or cell.paper is None:
        return float("inf")
    return round(cell.mean, 3) - round(cell.paper, 3)


def stands(cell: Cell) -> str:
    """How a mean stands to the paper's number, as `Standing` counts; nothing where the paper tells none."""
    if cell.paper is None:
        return ""
    off = abs(distance_to_paper(cell))
    in_spread = cell.n > 1 and off <= 2 * (cell.std or 0.0)
    return "near" if off <= NEAR + 1e-9 else "spread" if in_spread else "outside"


def standing(table: Table) -> Standing:
    found = [stands(cell) for _, _, cell in of_paper(table)]
    return Standing(*(found.count(kind) for kind in Standing._fields))


def of_paper(table: Table) -> Iterator[tuple[str, str, Cell]]:
    """All numbers that the paper tells."""
    for row, cells in table.rows.items():
        yield from ((row, name, cell) for name, cell in cells.items() if cell.paper is not None)
