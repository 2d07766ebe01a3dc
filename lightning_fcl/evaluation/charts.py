"""Functions that reports and figures share: self-contained HTML pages, axes, colors, curves over seeds, PNG files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import jinja2
import numpy as np
import vl_convert
from numpy.typing import ArrayLike

from lightning_fcl import __version__
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.curves import Curve
from lightning_fcl.evaluation.record import Quantity
from lightning_fcl.evaluation.statistics import seed_statistics
from lightning_fcl.evaluation.summary import model_name
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.paths import cache_folder
from lightning_fcl.io.reading import read_bytes, read_text

Points: TypeAlias = list[dict[str, Any]]
Spec: TypeAlias = dict[str, Any]
Chart: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart | alt.ConcatChart

# Six colors of the palette of Okabe and Ito, and gray. Color-blind readers can distinguish these colors. The yellow of
# the palette is too faint for lines.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777")
_SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right")
_DASHES = [dash for dash in ([1, 0], [6, 3], [2, 2]) for _ in COLORS]
_PNG = {
    "font": "sans-serif",
    "lineBreak": "\n",
    "axis": {"titleFontWeight": "normal", "titleFontSize": 12, "labelFontSize": 11, "labelLimit": 0, "domain": False},
    "axisQuantitative": {"gridColor": "#e6e6e6"},
    "legend": {"labelLimit": 0, "labelFontSize": 11, "symbolLimit": 0, "symbolOpacity": 1},
    "header": {"labelAnchor": "start", "labelFontSize": 12, "labelFontWeight": "bold", "labelLimit": 0},
    "title": {"anchor": "middle", "fontSize": 14, "fontWeight": "normal", "offset": 12},
    "view": {"stroke": "#999999"},
    "facet": {"spacing": 18},
}
_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = {"1.9.0.post1": "373b1f84072b31010f15ceb787be6b415c53936411aae267c8c2b2b6ccde46e7"}
"""SHA-256 of the script that renders charts, by version of vl-convert-python. Other scripts are not cached."""


def get_chart(name: str) -> alt.Chart:
    """Return a chart whose data set has a name but no rows. `spec` adds the rows, so that Altair validates no row."""
    return alt.Chart(alt.NamedData(name=name))


def spec(chart: Chart, **data: Points) -> Spec:
    """Return the Vega-Lite specification of a chart with its data. Each keyword is the name of a data set."""
    content: Spec = chart.to_dict()
    plain = {name: [{key: _plain(value) for key, value in row.items()} for row in rows] for name, rows in data.items()}
    return {**content, "datasets": content.get("datasets", {}) | plain}


def responsive_chart(chart: Chart, height: int = 260, **data: Points) -> Spec:
    """Return the specification of a chart that is as wide as its container. ``height`` is in pixels."""
    wide = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**spec(chart.properties(height=height), **data), **wide}


def write_png(path: Path, chart: Spec) -> Path:
    """Write a chart as a PNG file, and return the path. This function needs neither a browser nor a network."""
    return write_atomic(path, vl_convert.vegalite_to_png(chart, scale=1.5, config=_PNG))


def _plain(value: Any) -> Any:
    """Round a float to four significant digits. Return None for a non-finite float, and other values unchanged."""
    if isinstance(value, float | np.floating):
        return float(f"{value:.4g}") if np.isfinite(value) else None
    return value


def client_curves(curves_by_model: Mapping[str, Curve]) -> dict[int, dict[str, float]]:
    """Return, by round (from 0), a dict of each tested client's value on all groups that the client has learned."""
    values_by_round: dict[int, dict[str, float]] = {}
    for model, curve in curves_by_model.items():
        for number, value in zip(curve.rounds.tolist(), curve.seen_classes.tolist(), strict=True):
            if model != "server" and np.isfinite(value):
                values_by_round.setdefault(number, {})[model] = value
    return dict(sorted(values_by_round.items()))


def over_seeds(curves: Iterable[FloatArray]) -> Points:
    """Return a point for each round (from 1) with the mean and the standard deviation over seeds, one curve per seed.

    NaN values are left out, and a round without values has no point. ``low`` and ``high`` are one standard deviation
    below and above the mean. A round with the value of a single seed has no standard deviation: ``std`` is "-".
    """
    seeds, points = [*curves], []
    for position in range(max(map(len, seeds), default=0)):
        values = [curve[position] for curve in seeds if position < len(curve) and np.isfinite(curve[position])]
        if values:
            numbers = seed_statistics(values)
            point = {"round": position + 1, "value": numbers.mean, "std": "-", "seeds": numbers.n}
            if numbers.std is not None:
                low, high = numbers.mean - numbers.std, numbers.mean + numbers.std
                point |= {"std": numbers.std, "low": low, "high": high}
            points.append(point)
    return points


def quantity_scale(quantity: Quantity, zero: bool = False) -> alt.Scale:
    """Return the scale of a quantity: the bounds, or the range of the values if there are no bounds.

    If ``zero``, a scale without bounds includes 0.
    """
    return alt.Scale(domain=[*quantity.bounds]) if quantity.bounds else alt.Scale(zero=zero)


def value_axis(quantity: Quantity, field: str = "value:Q") -> alt.Y:
    """Return the vertical axis of a quantity."""
    return alt.Y(field, title=quantity.name, scale=quantity_scale(quantity))


def round_axis(rounds: int, title: str = "round") -> alt.X:
    """Return the axis of the rounds 1 to ``rounds``, with at most 12 ticks."""
    ticks = [*range(1, rounds + 1, max(1, -(-rounds // 12)))]
    scale = alt.Scale(nice=False, domain=[0.5, rounds + 0.5])
    return alt.X("round:Q", title=title, axis=alt.Axis(values=ticks, format="d", labelOverlap=True), scale=scale)


def integer_axis() -> alt.Axis:
    """Return an axis of integers that hides labels if they would overlap."""
    return alt.Axis(labelAngle=0, labelOverlap=True)


def heat_scale(quantity: Quantity) -> alt.Color:
    """Return the color scale of a heat map of a quantity. The colors also differ in lightness."""
    domain = [*quantity.bounds] if quantity.bounds else alt.Undefined
    return alt.Color("value:Q", title=quantity.name, scale=alt.Scale(scheme="viridis", domain=domain))


def cycle_styles(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return an encoding that assigns a value to each name. Values repeat if there are more names than values."""
    scale = alt.Scale(domain=[*names], range=[values[number % len(values)] for number in range(len(names))])
    return {"sort": [*names], "title": None, "scale": scale}


def color_scale(field: str, names: Sequence[str], colours: Sequence[str] = COLORS) -> alt.Color:
    """Return an encoding that assigns a color to each name."""
    return alt.Color(f"{field}:N", **cycle_styles(names, colours))


def shape(field: str, names: Sequence[str]) -> alt.Shape:
    """Return an encoding that assigns a shape to each name."""
    return alt.Shape(f"{field}:N", **cycle_styles(names, _SHAPES))


def draw_points(base: alt.Chart) -> alt.Chart:
    """Return the layer of the points of a line chart."""
    point_chart: alt.Chart = base.mark_point(filled=True, size=36, opacity=1)
    return point_chart


def small_multiples(
    base: alt.Chart, names: Sequence[str], title: str, scale: alt.Scale, rows: Points, x: str = "round"
) -> list[alt.Chart]:
    """Return the layers of a line chart: bands, lines and points.

    Lines differ in color and in the shape of their points. If there are more lines than colors, the last lines are
    dashed. A line that is covered by another line is wider, so that both lines are visible.

    Args:
        base: Chart with the horizontal axis.
        names: Names of the lines, in the order in which they are drawn.
        title: Title of the vertical axis.
        scale: Scale of the vertical axis.
        rows: Points of the lines.
        x: Field of the horizontal position of a point.
    """
    base = base.encode(color=color_scale("line", names))
    value, low = (alt.Y(field, title=title, scale=scale) for field in ("value:Q", "low:Q"))
    band = base.mark_area(opacity=0.16, clip=True).encode(y=low, y2="high:Q")
    line = base.mark_line().encode(y=value)
    if len(names) > len(COLORS):
        line = line.encode(strokeDash=alt.StrokeDash("line:N", **cycle_styles(names, _DASHES)))
    widths = line_widths(names, rows, x)
    if len({*widths}) > 1:
        # The legend has no widths, because the width is not a channel of the field `line`.
        width_by_name = json.dumps(dict(zip(names, widths, strict=True)))
        line = line.transform_calculate(width=f"{width_by_name}[datum.line]")
        line = line.encode(strokeWidth=alt.StrokeWidth("width:Q", scale=None, legend=None))
    return [band, line, draw_points(base).encode(y=value, shape=shape("line", names))]


def line_widths(names: Sequence[str], rows: Points, x: str = "round") -> list[int]:
    """Return the width of each line in pixels: 2, or 2 more than the widest later line that covers one of its segments.

    A line covers a segment of another line if it has the same two consecutive points in the same panel and view. Points
    are the same if they differ by at most 0.5 % of the range of all values.

    Example:
        >>> same = [{"round": number, "value": 0.5} for number in (1, 2)]
        >>> line_widths(["a", "b"], [{"line": line, **point} for line in "ab" for point in same])
        [4, 2]
    """
    values = [row["value"] for row in rows if np.isfinite(row["value"])]
    tolerance = 0.005 * (max(values) - min(values)) if values else 0.0
    segments: dict[str, dict[Any, tuple[float, float]]] = {name: {} for name in names}
    previous_points: dict[Any, tuple[Any, float]] = {}
    for row in rows:
        key = (row["line"], row.get("panel"), row.get("view"))
        if key in previous_points:
            start, value = previous_points[key]
            segments[row["line"]][(*key[1:], start, row[x])] = (value, row["value"])
        previous_points[key] = (row[x], row["value"])
    widths: dict[str, int] = {}
    for name in reversed(names):
        covering = [
            widths[other]
            for other in widths
            if any(
                abs(ends[0] - segments[other][key][0]) <= tolerance
                and abs(ends[1] - segments[other][key][1]) <= tolerance
                for key, ends in segments[name].items()
                if key in segments[other]
            )
        ]
        widths[name] = 2 + max(covering, default=0)
    return [widths[name] for name in names]


def density_points(edges: ArrayLike, density: ArrayLike) -> Points:
    """Return a point for each bin of a density. The point is in the middle of the bin."""
    ends, values = np.asarray(edges), np.asarray(density)
    return [{"activation": x, "value": value} for x, value in zip((ends[:-1] + ends[1:]) / 2, values, strict=True)]


def density_lines(names: Sequence[str], ordered: bool) -> alt.Chart:
    """Return a chart of densities as step lines. If ``ordered``, the colors of the lines go from dark to light."""
    shades = alt.Scale(scheme=alt.SchemeParams("viridis", extent=[0, 0.88]))
    look = alt.Color("line:N", sort=[*names], title=None, scale=shades) if ordered else color_scale("line", names)
    x = alt.X("activation:Q", scale=alt.Scale(domain=[-1, 1]), axis=alt.Axis(tickCount=4))
    line_chart: alt.Chart = get_chart("rows").mark_line(interpolate="step")
    return line_chart.encode(x=x, y=alt.Y("value:Q", title="density"), color=look)


def with_model_selector(chart: Chart, models: Sequence[str], label: str = "model ") -> Chart:
    """Return the chart of the selected model. If there are several models, the chart has a list to select a model."""
    labels = [model_name(model) for model in models]
    bind = alt.binding_select(options=[*models], labels=labels, name=label) if len(models) > 1 else alt.Undefined
    selector = alt.param(name="shown", value=models[0], bind=bind)
    return chart.transform_filter("datum.model == shown").add_params(selector)


def make_tooltips(**fields: str) -> list[alt.Tooltip]:
    """Return one tooltip entry for each keyword argument.

    The name of the argument is the field, and its value is the title, as in ``round="Round"``. If the title is empty,
    the entry shows the field's name.
    """
    return [alt.Tooltip(field=field, type="nominal", title=title or field) for field, title in fields.items()]


def fill_template(template: str, **values: Any) -> str:
    """Return the HTML of a template. Values are escaped, and the security policy of the page blocks all requests."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    texts = {name: read_text(_TEMPLATES / name) for name in ("page.css", "page.js")}
    return environment.get_template(template).render(values, version=__version__, texts=texts, library=_library)


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that can be embedded in a page.

    Making the script takes seconds, so the script is stored in the cache folder. A stored script is used only if its
    SHA-256 equals the value in `_SCRIPTS` for the installed version of vl-convert-python.
    """
    made_by = version("vl-convert-python")
    path, digest = cache_folder() / "scripts" / f"vega-{made_by}.js", _SCRIPTS.get(made_by)
    content = b""
    # A missing or unreadable file is written again below.
    with suppress(OSError, ValueError):
        content = read_bytes(path)
    if digest is None or hashlib.sha256(content).hexdigest() != digest:
        content = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed").encode()
        if hashlib.sha256(content).hexdigest() == digest:
            # Without a writable cache, each process makes the script again.
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content)
    return re.sub("</(?=script)", r"<\\/", content.decode(), flags=re.IGNORECASE)
