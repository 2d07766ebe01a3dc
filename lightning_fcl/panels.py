"""Panels of lines on shared axes: stream accuracy as experiences pass, and the density of a reservoir's activations."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from lightning_fcl.metrics import FloatArray, stream_accuracies
from lightning_fcl.plots import blank_figure, model_name, style

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


def stream_accuracy_figure(record: Mapping[str, Any]) -> "Figure | None":
    """Stream accuracy of the server and of the clients of a run; nothing where there is only one experience.

    Clients with fewer experiences than the server are left out. Several clients are one line, their mean.
    """
    names = experience_names(record)
    tested = {model for entry in record["rounds"] for model in entry["correct"]}
    if len(names) < 2 or not tested:
        return None
    models = [model for model, tasks in record["tasks"].items() if model in tested and len(tasks) == len(names)]
    curves = {model: stream_accuracies(record, model) for model in models}
    lines = {"server": [curves.pop("server")]} if "server" in curves else {}
    if curves:
        lines[model_name("clients" if len(curves) > 1 else next(iter(curves)))] = list(curves.values())
    return stream_accuracy_panels({"": lines}, names) if lines else None


def stream_accuracy_panels(
    panels: Mapping[str, Mapping[str, ArrayLike]], experiences: Sequence[str], title: str = ""
) -> "Figure":
    """Stream accuracy after each experience, as in figures 4 and 6 of De Caro et al. 2023.

    Args:
        panels: For each panel, its lines by their labels, each of shape (repeats, experiences): a line is the mean of
            the repeats, with a band of one standard deviation where there are several. NaN where there is none.
        experiences: Names of the experiences.
        title: Above all panels.
    """
    figure, axes = _grid(panels, 3.1, title)
    order = _order(panels)
    for panel, lines in zip(axes, panels.values(), strict=False):
        for label, values in lines.items():
            _band(panel, np.asarray(values, dtype=np.float64), label, style(order[label]))
        letters = 14 if len(panels) <= 2 else 10
        ticks = ["\n".join(textwrap.wrap(name, letters, break_long_words=False)) for name in experiences]
        slanted = max(len(line) for tick in ticks for line in tick.split("\n")) * len(ticks) > 4 * letters
        panel.set_xticks(range(1, len(ticks) + 1), ticks, fontsize=8, rotation=30 if slanted else 0)
        panel.set_xlim(0.7, len(ticks) + 0.3)
        panel.set_ylim(-0.02, 1.02)
    _label(figure, axes, len(panels), "after experience", "stream accuracy")
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


def density_figure(densities: Mapping[str, Any]) -> "Figure | None":
    """The record of an `ActivationDensity`: a line per experience, a panel for all test samples and for each group."""
    entries = densities["experiences"]
    if not entries:
        return None
    names = {f"experience {entry['experience'] + 1}": entry for entry in entries}
    groups = list(entries[-1]["groups"])[: _PANELS - 1]
    panels = {"all test samples": {name: (densities["edges"], entry["all"]) for name, entry in names.items()}}
    for group in groups if len(groups) > 1 else ():
        panels[group] = {name: (densities["edges"], entry["groups"][group]) for name, entry in names.items()}
    return density_panels(panels, ordered=True)


def density_panels(panels: Mapping[str, Mapping[str, Density]], title: str = "", ordered: bool = False) -> "Figure":
    """Densities of activations, as in figures 3 and 5 of De Caro et al. 2023.

    Args:
        panels: For each panel, its lines by their labels: edges of bins, shape (B + 1,), and densities, shape (B,).
        title: Above all panels.
        ordered: Whether the lines follow one another in time: they then go from dark to light.
    """
    figure, axes = _grid(panels, 2.7, title)
    order = _order(panels)
    for panel, lines in zip(axes, panels.values(), strict=False):
        for label, (edges, density) in lines.items():
            panel.stairs(density, edges, label=label, **_outline(order[label], len(order) if ordered else 0))
        panel.set_xlim(-1, 1)
    axes[0].set_ylim(bottom=0)
    _label(figure, axes, len(panels), "activation", "density")
    return figure


def _outline(index: int, ordered: int) -> dict[str, Any]:
    from matplotlib import colormaps

    look = style(index)
    colour = colormaps["viridis"](0.88 * index / max(ordered - 1, 1)) if ordered else look["color"]
    return {"color": colour, "linestyle": "-" if ordered else look["linestyle"], "linewidth": 1.4}


def _grid(panels: Mapping[str, Any], height: float, title: str) -> tuple["Figure", list["Axes"]]:
    number = len(panels)
    columns = number if number <= 3 else 2 if number == 4 else 3 if number <= 9 else 4
    rows = -(-number // columns)
    figure = blank_figure({1: 7.5, 2: 10.5}.get(columns, 12), height * rows + 0.9)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel, name in zip(axes, panels, strict=False):
        panel.set_title(name, fontsize=10, fontweight="bold", loc="left")
        panel.grid(axis="y", alpha=0.3)
    for above, panel in zip(axes, axes[columns:], strict=False):
        above.tick_params(labelbottom=axes.index(panel) >= number)  # nothing stands below it
    for panel in axes[number:]:
        panel.set_axis_off()
    figure.suptitle(title, fontsize=12)
    return figure, axes


def _label(figure: "Figure", axes: Sequence["Axes"], number: int, x: str, y: str) -> None:
    """Name the axes once, and all lines in one legend below the panels."""
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)
    shown = [panel.get_legend_handles_labels() for panel in axes[:number]]
    handles = {label: handle for some, labels in shown for handle, label in zip(some, labels, strict=True)}
    step = -(-len(handles) // _LINES)
    names = [name for place, name in enumerate(handles) if place % step == 0 or place == len(handles) - 1]
    if names:
        columns = max(1, min(len(names), int(110 * figure.get_figwidth() / 12) // (max(map(len, names)) + 6)))
        figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=columns, frameon=False)


def _order(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The place of each label: it looks the same in all panels."""
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    return {label: place for place, label in enumerate(labels)}
