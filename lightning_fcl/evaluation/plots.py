"""Colours, names and empty figures: what all plots share."""

from typing import TYPE_CHECKING, Any

from lightning_fcl.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: its colours stay apart for colour-blind readers. Yellow is left out, too faint for lines.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777")
_MARKERS = "osD^vPX*<>"


def model_name(model: str) -> str:
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


def style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": ("-", "--", ":")[min(index // len(COLOURS), 2)],
        "markersize": 4.5,
        "linewidth": 1.6,
        "alpha": 0.9,
    }
