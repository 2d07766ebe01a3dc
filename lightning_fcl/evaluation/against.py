"""Our numbers against a paper's, cell by cell: how many are near, and a figure of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_fcl.evaluation.plots import blank_figure, style
from lightning_fcl.evaluation.table import Cell, Table, metric_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.05
"""How far from the paper's number a mean is near it."""

_SPREADS = 2  # standard deviations over the seeds that are the spread
_NAMED = 8


@dataclass(frozen=True)
class Verdict:
    """How the numbers of a table lie to the paper's.

    Args:
        near: How many are within `NEAR` of it.
        spread: How many of the others are within two standard deviations over the seeds.
        outside: How many are further away, or were not measured.
    """

    near: int
    spread: int
    outside: int

    @property
    def cells(self) -> int:
        return self.near + self.spread + self.outside

    @property
    def word(self) -> str:
        """The verdict: reproduced if at most a tenth lies outside, not if more than half does."""
        if not self.cells:
            return "not compared"
        share = self.outside / self.cells
        return "reproduced" if share <= 0.1 else "not reproduced" if share > 0.5 else "partly reproduced"


def near(cell: Cell) -> bool:
    """Whether a mean is within `NEAR` of the paper's number, both as printed, to three digits."""
    return (distance := _distance(cell)) is not None and abs(distance) <= NEAR + 1e-9


def stands(cell: Cell) -> Literal["near", "spread", "outside", ""]:
    """How a mean stands to the paper's number, as `Verdict` counts; nothing where the paper tells none."""
    if cell.paper is None:
        return ""
    distance = _distance(cell)
    in_spread = distance is not None and cell.n > 1 and abs(distance) <= _SPREADS * (cell.std or 0.0)
    return "near" if near(cell) else "spread" if in_spread else "outside"


def verdict(table: Table) -> Verdict:
    found = [stands(cell) for _, _, cell in told(table)]
    return Verdict(*(found.count(kind) for kind in ("near", "spread", "outside")))


def against_figure(table: Table) -> Figure | None:
    """Each mean against the paper's number, with two standard deviations; None if the paper tells no number.

    Numbers beside the points tell which lie furthest out, and stand with their names on the right.
    """
    there = [(row, name, cell) for row, name, cell in told(table) if cell.values]
    if not there:
        return None
    figure = blank_figure(11, 6.6)
    panel, names = figure.subplots(1, 2, width_ratios=(5, 3))
    metrics = list(dict.fromkeys(name for _, name, _ in there))
    for index, metric in enumerate(metrics):
        of = [cell for _, name, cell in there if name == metric]
        look = {**style(index), "linestyle": "none", "elinewidth": 0.8, "alpha": 0.75}
        spreads = [_SPREADS * (cell.std or 0.0) for cell in of]
        panel.errorbar(
            [cell.paper for cell in of],
            [cell.mean for cell in of],
            yerr=spreads if any(spreads) else None,
            label=metric_title(metric),
            **look,
        )
    _diagonal(panel)
    scale = "at its scale" if table.scale == "paper" else f"of its own scale, ours at the scale `{table.scale}`"
    panel.set(xlabel=f"the paper's number, {scale}", ylabel="ours: mean, and two standard deviations over the seeds")
    lines = _name_furthest(panel, there)
    names.set_axis_off()
    names.legend(*panel.get_legend_handles_labels(), loc="upper left", fontsize=8, frameon=False)
    if lines:
        names.text(0, 0, "furthest out:\n" + "\n".join(lines), fontsize=8, va="bottom", linespacing=1.35)
    figure.suptitle(f"{table.paper}: ours against the paper", fontsize=12)
    return figure


def _name_furthest(panel: Axes, there: Sequence[tuple[str, str, Cell]]) -> list[str]:
    """Number the points that lie furthest out; the names behind the numbers. Points close by share a place."""
    far = sorted((one for one in there if not near(one[2])), key=lambda one: -abs(_distance(one[2]) or 0.0))[:_NAMED]
    close = 0.025 * (panel.get_xlim()[1] - panel.get_xlim()[0])
    places: dict[tuple[float, float], list[str]] = {}
    lines = []
    for number, (row, name, cell) in enumerate(far, start=1):
        point = (cell.paper or 0.0, cell.mean or 0.0)
        place = next((other for other in places if np.hypot(*np.subtract(other, point)) < close), point)
        places.setdefault(place, []).append(str(number))
        lines.append(f"{number}  {row}\n    {metric_title(name)}: {cell.mean:.3f}, paper {cell.paper:.3f}")
    for place, numbers in places.items():
        panel.annotate(", ".join(numbers), place, (5, 4), textcoords="offset points", fontsize=8, fontweight="bold")
    return lines


def _diagonal(panel: Axes) -> None:
    """The line on which ours is the paper's, and the band of what is near, over all that is drawn."""
    low, high = min(panel.get_xlim()[0], panel.get_ylim()[0]), max(panel.get_xlim()[1], panel.get_ylim()[1])
    ends = np.array([low, high])
    panel.fill_between(ends, ends - NEAR, ends + NEAR, color="#bbbbbb", alpha=0.4, linewidth=0, label=f"within {NEAR}")
    panel.plot(ends, ends, color="black", linewidth=0.8)
    panel.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    panel.grid(alpha=0.3)


def told(table: Table) -> Iterator[tuple[str, str, Cell]]:
    """All numbers that the paper tells."""
    for row, cells in table.rows.items():
        yield from ((row, name, cell) for name, cell in cells.items() if cell.paper is not None)


def _distance(cell: Cell) -> float | None:
    if cell.mean is None or cell.paper is None:
        return None
    return round(cell.mean, 3) - round(cell.paper, 3)
