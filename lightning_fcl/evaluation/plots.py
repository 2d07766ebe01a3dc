"""Plots of a run's record, as Matplotlib figures that need no display."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.errors import require
from lightning_fcl.evaluation.communication import volumes
from lightning_fcl.evaluation.metrics import Curve, curves, matrices, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: its colours stay apart for colour-blind readers. Yellow is left out, too faint for lines.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777")
_MARKERS = "osD^vPX*<>"
_PANELS = 4


def model_name(model: str) -> str:
    """How a model is shown."""
    names = {"clients": "mean of the clients"}
    return names.get(model, f"client {model}" if model.isdigit() else model)


def blank_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that needs no display."""
    # A bare Figure is drawn by Agg and, unlike pyplot, touches neither a display nor global state.
    require("matplotlib", "draws figures")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    return Figure(figsize=(width, height), dpi=110, layout=margins)


def panels_of(number: int, columns: int, width: float, height: float, **shared: Any) -> tuple["Figure", list["Axes"]]:
    """A figure of so many panels, in rows of some columns, of so many inches in all; places without one stay empty."""
    figure = blank_figure(width, height)
    axes = list(figure.subplots(-(-number // columns), columns, squeeze=False, **shared).flat)
    for panel in axes[number:]:
        panel.set_axis_off()
    return figure, axes[:number]


def compare_figure(results_by_label: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """The server's accuracy per round, the final accuracy and the forgetting of several runs.

    Raises:
        ValueError: If there is no run, or the server was not tested in one of them.
    """
    if not results_by_label:
        raise ValueError("Expected `results_by_label` to have at least one run but got none.")
    every = {label: curves(results["record"]) for label, results in results_by_label.items()}
    if without := [label for label, models in every.items() if "server" not in models]:
        raise ValueError(f"Expected a record of the server in `results_by_label` but {', '.join(without)} has none.")
    figure = blank_figure(12, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (label, models) in enumerate(every.items()):
        curve = models["server"]
        left.plot(curve.rounds + 1, curve.overall, label=label, **style(index))
    longest = max(
        (results["record"] for results in results_by_label.values()), key=lambda record: len(record["rounds"])
    )
    _experiences(left, longest, "server", letters=75)
    of = scale(left, longest)
    left.set_ylabel(f"{of} of the server, whole test set")
    left.grid(axis="y", alpha=0.3)
    _bars(right, {label: results["metrics"] for label, results in results_by_label.items()}, of)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def scale(panel: "Axes", record: Mapping[str, Any]) -> str:
    """Let an axis of accuracies go from 0 to 1, that of another quantity as it will; the quantity's name."""
    if "measures" not in record:
        panel.set_ylim(-0.04, 1.04)
    return quantity(record)


def accuracy_figure(record: Mapping[str, Any]) -> "Figure | None":
    """A panel per model with a line per group, as in figures 2 and 3 of Usmanova et al. 2021."""
    models = dict(list(curves(record).items())[:_PANELS])
    if not models:
        return None
    columns, names = min(2, len(models)), record["groups"]
    figure, panels = panels_of(len(models), columns, 12, 3.6 * -(-len(models) // columns) + 0.3, sharey=True)
    for panel, (model, curve) in zip(panels, models.items(), strict=True):
        # More lines than markers would be a tangle.
        draw = _lines if len(names) <= len(_MARKERS) else _heat
        draw(panel, curve, names, record)
        _experiences(panel, record, model, letters=120 // columns)
        panel.set_title(model_name(model), fontweight="bold", loc="left", pad=28)
    if len(names) <= len(_MARKERS):
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title="group", frameon=False)
    else:
        figure.colorbar(panels[0].images[0], ax=figure.axes, label=quantity(record), shrink=0.8)
    return figure


def _lines(panel: "Axes", curve: Curve, names: Sequence[str], record: Mapping[str, Any]) -> None:
    for group, name in enumerate(names):
        panel.plot(curve.rounds + 1, curve.accuracy[:, group], label=name, **style(group))
    panel.plot(curve.rounds + 1, curve.overall, color="black", linestyle=":", linewidth=2, label="whole test set")
    panel.set_ylabel(scale(panel, record))
    panel.grid(axis="y", alpha=0.3)


def _heat(panel: "Axes", curve: Curve, names: Sequence[str], record: Mapping[str, Any]) -> None:
    first, last = int(curve.rounds[0]), int(curve.rounds[-1])
    grid = np.full((len(names), last - first + 1), np.nan)
    grid[:, curve.rounds - first] = curve.accuracy.T
    extent = (first + 0.5, last + 1.5, -0.5, len(names) - 0.5)
    low, high = _limits([curve.accuracy for curve in curves(record).values()], record)
    panel.imshow(grid, extent=extent, origin="lower", aspect="auto", vmin=low, vmax=high, interpolation="nearest")
    panel.set_ylabel("group")
    if len(names) <= 25:
        panel.set_yticks(range(len(names)), names, fontsize=7)


def _limits(values: Iterable[NDArray[np.float64]], record: Mapping[str, Any]) -> tuple[float, float]:
    """What the colours of a heat map go from and to: accuracies from 0 to 1, other quantities by what there is."""
    every = np.concatenate([value.ravel() for value in values])
    every = every[np.isfinite(every)]
    return (float(every.min()), float(every.max())) if "measures" in record and len(every) else (0.0, 1.0)


def _experiences(panel: "Axes", record: Mapping[str, Any], model: str, letters: int) -> None:
    """Mark where the model's experiences begin, and write above each which groups are then learnt."""
    entries = [entry for entry in record["rounds"] if model in entry["experience"]]
    rounds = [entry["round"] + 1 for entry in entries]
    numbers = [entry["experience"][model] for entry in entries]
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    edges = [*(rounds[start] - 0.5 for start in starts), rounds[-1] + 0.5]
    for edge in edges[1:-1]:
        panel.axvline(edge, color="white" if panel.images else "0.35", linestyle="--", linewidth=1)
    for start, left, right in zip(starts, edges, edges[1:], strict=False):
        if numbers[start] >= len(record["tasks"][model]):
            continue  # the other clients have more tasks: this one has finished
        names = [record["groups"][group] for group in record["tasks"][model][numbers[start]]]
        text = _task_label(numbers[start], names, int(letters * (right - left) / (edges[-1] - edges[0])))
        position = ((left + right) / 2, 1.02)
        panel.text(*position, text, transform=panel.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
    panel.set_xlim(edges[0], edges[-1])
    panel.locator_params(axis="x", integer=True)
    panel.set_xlabel("round")


def _task_label(number: int, names: Sequence[str], letters: int) -> str:
    """The names of a task's groups, or else how many, or else only the task's number: what fits."""
    for text in (", ".join(names), f"task {number + 1} ({len(names)} groups)"):
        lines = textwrap.wrap(text, max(letters, 1), break_long_words=False)
        # Wrapping "0, 1" would save no room worth having.
        if max(map(len, lines), default=0) <= letters and len(lines) <= (2 if letters >= 12 else 1):
            return "\n".join(lines)
    return str(number + 1)


def matrix_figure(record: Mapping[str, Any]) -> "Figure | None":
    """A heat map per model with several tasks: accuracy, or `quantity`, on task d after task t."""
    models = dict(list(matrices(record).items())[:_PANELS])
    if not models:
        return None
    alone = len(models) == 1
    width, height = (8.2, 5.6) if alone else (12, 4.6 * -(-len(models) // 2))
    figure, panels = panels_of(len(models), 1 if alone else 2, width, height)
    of, (low, high) = quantity(record), _limits(models.values(), record)
    for panel, (model, matrix) in zip(panels, models.items(), strict=True):
        image = panel.imshow(matrix, vmin=low, vmax=high, cmap="viridis")
        size = len(matrix)
        for (t, d), value in np.ndenumerate(matrix) if size <= 10 else ():
            colour = "white" if value < low + 0.6 * (high - low) else "black"
            panel.text(d, t, "-" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=colour)
        # Right of this staircase the task has not been learnt yet.
        panel.step(np.arange(size) + 0.5, np.arange(size) - 0.5, where="pre", color="white", linewidth=2)
        labels = [
            _task_label(t, [record["groups"][g] for g in record["tasks"][model][t]], 60 // size) for t in range(size)
        ]
        shown = range(0, size, 1 + size // 20)
        panel.set_xticks(shown, [labels[t] for t in shown], fontsize=8)
        panel.set_yticks(shown, [labels[t] for t in shown], fontsize=8)
        panel.set(xlabel=f"{of} on task", ylabel="after task")
        panel.set_title(model_name(model), fontweight="bold")
    figure.colorbar(image, ax=figure.axes, label=f"{of}, mean over the task's rounds", shrink=0.8)
    return figure


def traffic_figure(record: Mapping[str, Any]) -> "Figure | None":
    """Megabytes of all clients together, up and down, per round."""
    rounds = np.array([entry["round"] + 1 for entry in record["rounds"]])
    sums = volumes(record) / 1e6
    if not np.any(sums):
        return None
    figure = blank_figure(10, 3.2)
    panel = figure.subplots()
    for index, (way, megabytes) in enumerate(zip(("upload", "download"), sums, strict=True)):
        label, colour = f"{way}s of all clients", _COLOURS[index]
        if len(rounds) <= 40:
            panel.bar(rounds + 0.4 * index - 0.2, megabytes, width=0.38, color=colour, label=label)
        else:
            panel.plot(rounds, megabytes, color=colour, linestyle=("-", "--")[index], label=label)
    panel.locator_params(axis="x", integer=True)
    panel.set_xlim(rounds[0] - 0.7, rounds[-1] + 0.7)
    panel.set_ylim(0, 1.05 * np.max(sums))
    panel.set(xlabel="round", ylabel="MB per round (1 MB = 10⁶ bytes)")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _bars(panel: "Axes", metrics: Mapping[str, Mapping[str, float]], of: str) -> None:
    """Final accuracy, or another quantity, and forgetting of the server, a bar per run."""
    names = (f"final_{of}", "forgetting" if of == "accuracy" else f"forgetting_{of}")
    better = "\n(higher is better)" if of == "accuracy" else ""
    width = 0.8 / len(metrics)
    for index, (label, values) in enumerate(metrics.items()):
        for position, name in enumerate(names):
            value = values.get(f"{name}/server")
            x = position + (index - (len(metrics) - 1) / 2) * width
            panel.bar(
                x, value or 0, width=0.92 * width, color=style(index)["color"], label=label if not position else None
            )
            text = "n/a" if value is None else f"{value:.2f}"
            panel.annotate(text, (x, max(value or 0, 0)), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(names)), [f"final {of}" + better, "forgetting\n(lower is better)"])
    panel.set_ylabel("server, test set")
    panel.margins(y=0.1)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def style(index: int) -> dict[str, Any]:
    """The look of the line of this number."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": ("-", "--", ":")[min(index // len(_COLOURS), 2)],
        "markersize": 4.5,
        "linewidth": 1.6,
        "alpha": 0.9,
    }
