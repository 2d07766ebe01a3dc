"""Panels of lines on shared axes: stream accuracy as experiences pass, and the density of a reservoir's activations.

The functions take, for each panel's title, what it shows by the labels of its lines, and a title above all panels. What
has several repeats, shape (repeats, ...), is drawn as their mean with a band of one standard deviation, and NaN where
there is none.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from lightning_fcl.errors import require
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.plots import blank_figure, panels_of, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Density: TypeAlias = tuple[ArrayLike, ArrayLike]
"""The edges of the bins, and the density in each."""

_PANELS = 12
_LINES = 10  # that a legend names


def experience_names(record: Mapping[str, Any]) -> list[str]:
    """What the server's experiences are called: by their groups, or their numbers where names would be too long."""
    tasks = [[record["groups"][group] for group in groups] for groups in record["tasks"].get("server", [])]
    names = [", ".join(groups) for groups in tasks]
    distinct = len(set(names)) == len(names) and max(map(len, names), default=0) <= 24
    return names if distinct else [str(number + 1) for number in range(len(names))]


def experience_labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands for each experience of several runs: by name, if it is the same in all of them."""
    names = experience_names(records[0])
    if names != [str(number + 1) for number in range(len(names))] and all(
        experience_names(r) == names for r in records
    ):
        return [f"after {name}" for name in names]
    return [f"after experience {number + 1}" for number in range(len(names))]


def stream_accuracy_panels(
    panels: Mapping[str, Mapping[str, ArrayLike]], experiences: Sequence[str], title: str = "", of: str = "accuracy"
) -> "Figure":
    """Stream accuracy, shape (repeats, experiences), as in figures 4 and 6 of De Caro et al. 2023, or another."""
    figure, axes = _grid(panels, 3.1, title, "after experience", f"stream {of}")
    order = _order(panels)
    for panel, lines in zip(axes, panels.values(), strict=True):
        for label, values in lines.items():
            _band(panel, np.asarray(values, dtype=np.float64), label, style(order[label]))
        letters = 14 if len(panels) <= 2 else 10
        ticks = ["\n".join(textwrap.wrap(name, letters, break_long_words=False)) for name in experiences]
        slanted = max(len(line) for tick in ticks for line in tick.split("\n")) * len(ticks) > 4 * letters
        panel.set_xticks(range(1, len(ticks) + 1), ticks, fontsize=8, rotation=30 if slanted else 0)
        panel.set_xlim(0.7, len(ticks) + 0.3)
        if of == "accuracy":
            panel.set_ylim(-0.04, 1.04)
    _legend(figure, axes)
    return figure


def _band(panel: "Axes", values: FloatArray, label: str, look: dict[str, Any]) -> None:
    """A line of means and, where there are several values, a band of one standard deviation around it."""
    there = np.isfinite(values).any(axis=0)
    x, values = np.flatnonzero(there) + 1, values[:, there]
    mean = np.nanmean(values, axis=0)
    panel.plot(x, mean, label=label, **look)
    if len(values) > 1:
        # The sample's deviation, as in tables; of a single value it is 0.
        degrees = np.isfinite(values).sum(axis=0) - 1
        spread = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / np.maximum(degrees, 1))
        panel.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)


def task_panels(panels: Mapping[str, Mapping[str, tuple[FloatArray, FloatArray]]], title: str = "") -> "Figure":
    """Average accuracy and below or beside it forgetting after each task, as in figure 5 of Zuo et al. 2024.

    Both of shape (repeats, tasks).
    """
    number, order = len(panels), _order(panels)
    shape = (1, 2) if number == 1 else (2, number)
    legend = 0.9 + 0.17 * len(order)  # inches: it names all lines
    figure = blank_figure(11.5 if number == 1 else 4.2 * number + 2.5, max(4.2 if number == 1 else 6.6, legend))
    axes = figure.subplots(*shape, sharex=True, sharey="row" if number > 1 else False, squeeze=False)
    for place, (name, lines) in enumerate(panels.items()):
        both = (axes[0, 0], axes[0, 1]) if number == 1 else (axes[0, place], axes[1, place])
        for panel, kind, of in zip(both, (0, 1), ("average accuracy", "forgetting"), strict=True):
            for label, values in lines.items():
                _band(panel, np.asarray(values[kind], dtype=np.float64), label, style(order[label]))
            panel.grid(axis="y", alpha=0.3)
            panel.locator_params(axis="x", integer=True)
            if place == 0:
                panel.set_ylabel(f"{of}, mean of the clients")
            if kind or number == 1:
                panel.set_xlabel("after task")
        both[1].axhline(0, color="black", linewidth=0.8)
        both[0].set_title(name, fontsize=10, fontweight="bold", loc="left")
    figure.suptitle(title, fontsize=12)
    _legend_beside(figure, list(axes.flat))
    return figure


def communication_panels(
    panels: Mapping[str, Mapping[str, tuple[FloatArray, FloatArray]]], bandwidths: Sequence[float], title: str = ""
) -> "Figure":
    """Volume of the communication, and its time against the bandwidth, as in figures 6 and 7 of Zuo et al. 2024.

    Bytes sent and received, shape (2,), and seconds at each bandwidth, shape (B,). Rows whose numbers are all the same
    share a line. Bandwidths are bytes per second.
    """
    heights = [0.9 + 0.24 * len(lines) for lines in panels.values()]
    figure = blank_figure(12.5, sum(max(height, 2.6) for height in heights) + 0.7)
    axes = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(1, 1), height_ratios=heights)
    for (left, right), (name, lines) in zip(axes, panels.items(), strict=True):
        alike = _alike(lines)
        for place, (label, (volume, _)) in enumerate(lines.items()):
            colour = style(alike[label][0])["color"]
            up, down = np.asarray(volume) / 1e6
            left.barh(place, up, height=0.72, color=colour)
            left.barh(place, down, left=up, height=0.72, color=colour, alpha=0.45)
            left.annotate(f" {up + down:,.4g}", (up + down, place), va="center", fontsize=8)
        left.set_yticks(range(len(lines)), ["\n".join(textwrap.wrap(label, 28)) for label in lines], fontsize=8)
        left.invert_yaxis()
        left.margins(x=0.14)
        left.set_xlabel("volume of all clients (MB of 10⁶ bytes): dark up, light down")
        left.set_title(name, fontsize=10, fontweight="bold", loc="left")
        for index, members in dict(alike.values()).items():
            right.plot(bandwidths, lines[members[0]][1], label=_wrapped(", ".join(members)), **style(index))
        _bandwidths(right, bandwidths)
    figure.suptitle(title, fontsize=12)
    for right in axes[:, 1]:
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return figure


def _alike(lines: Mapping[str, Sequence[FloatArray | None]]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """For each label, a number for its look and all labels that have the same numbers."""
    groups: dict[str, list[str]] = {}
    for label, values in lines.items():
        key = repr([None if part is None else np.asarray(part).tolist() for part in values])
        groups.setdefault(key, []).append(label)
    return {label: (index, tuple(group)) for index, group in enumerate(groups.values()) for label in group}


def _bandwidths(panel: "Axes", bandwidths: Sequence[float]) -> None:
    """Name the axes of a panel of times against bandwidths, both logarithmic."""
    panel.set(xscale="log", yscale="log", ylabel="communication time (s)", xlabel="bandwidth of a client")
    names = [f"{value / 1e6:g} MB/s" if value >= 1e6 else f"{value / 1e3:g} KB/s" for value in bandwidths]
    panel.set_xticks(bandwidths, names, fontsize=8, rotation=30)
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.3)


def volume_panels(panels: Mapping[str, Mapping[str, FloatArray]], title: str = "") -> "Figure":
    """Bytes of each round, both ways together, shape (repeats, rounds); labels with the same numbers share a line."""
    figure, axes = _grid(panels, 3.1, title, "round", "MB per round")
    alike = _alike({label: [lines.get(label) for lines in panels.values()] for label in _order(panels)})
    for panel, lines in zip(axes, panels.values(), strict=True):
        for index, members in dict(alike[label] for label in lines).items():
            values = np.asarray(lines[members[0]], dtype=np.float64) / 1e6
            many = {"marker": ""} if values.shape[1] > 40 else {}
            _band(panel, values, _wrapped(", ".join(members)), {**style(index), **many})
        panel.locator_params(axis="x", integer=True)
    axes[0].set_ylim(bottom=0)
    _legend_beside(figure, axes)
    return figure


def density_panels(panels: Mapping[str, Mapping[str, Density]], title: str = "", ordered: bool = False) -> "Figure":
    """Densities of activations, as in figures 3 and 5 of De Caro et al. 2023; ordered ones go from dark to light."""
    figure, axes = _grid(panels, 2.7, title, "activation", "density")
    order = _order(panels)
    for panel, lines in zip(axes, panels.values(), strict=True):
        for label, (edges, density) in lines.items():
            panel.stairs(
                density, edges, baseline=None, label=label, **_outline(order[label], len(order) if ordered else 0)
            )
        panel.set_xlim(-1, 1)
        panel.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes[0].set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def _outline(index: int, ordered: int) -> dict[str, Any]:
    look, colours = style(index), require("matplotlib", "draws figures").colormaps["viridis"]
    colour = colours(0.88 * index / max(ordered - 1, 1)) if ordered else look["color"]
    return {"color": colour, "linestyle": "-" if ordered else look["linestyle"], "linewidth": 1.3, "alpha": 0.9}


def _grid(panels: Mapping[str, Any], height: float, title: str, x: str, y: str) -> tuple["Figure", list["Axes"]]:
    """Panels side by side, with shared axes that are named at the margin."""
    number = len(panels)
    columns = number if number <= 3 else 2 if number == 4 else 3 if number <= 9 else 4
    size = {1: 8.5, 2: 10.5}.get(columns, 12), height * -(-number // columns) + 0.9
    figure, axes = panels_of(number, columns, *size, sharex=True, sharey=True)
    for place, (panel, name) in enumerate(zip(axes, panels, strict=True)):
        panel.set_title(name, fontsize=10, fontweight="bold", loc="left")
        panel.grid(axis="y", alpha=0.3)
        if place % columns == 0:
            panel.set_ylabel(y)
        if place + columns >= number:  # no panel stands below it
            panel.set_xlabel(x)
            panel.tick_params(labelbottom=True)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure, axes


def _handles(panels: Sequence["Axes"]) -> dict[str, Any]:
    shown = [panel.get_legend_handles_labels() for panel in panels]
    return {label: handle for some, labels in shown for handle, label in zip(some, labels, strict=True)}


def _legend(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """Name the lines of all panels once, below them."""
    handles = _handles(panels)
    step = -(-len(handles) // _LINES)
    names = [name for place, name in enumerate(handles) if place % step == 0 or place == len(handles) - 1]
    if names:
        columns = max(1, min(len(names), int(110 * figure.get_figwidth() / 12) // (max(map(len, names)) + 6)))
        figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=columns, frameon=False)


def _legend_beside(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """Name every line of all panels once, on the right."""
    handles = _handles(panels)
    names = [_wrapped(name) for name in handles]
    figure.legend(handles.values(), names, loc="outside right center", fontsize=8, frameon=False, handlelength=3)


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 34))


def _order(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The place of each label: it looks the same in all panels."""
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    return {label: place for place, label in enumerate(labels)}
