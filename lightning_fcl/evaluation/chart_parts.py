"""What the charts of a page share: data, axes, colours, and the list from which one of several models is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.evaluation.metrics import Curve
from lightning_fcl.evaluation.plots import COLOURS, model_name

Record: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = list[dict[str, Any]]
Spec: TypeAlias = dict[str, Any]
Drawn: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart

HEIGHT = 260
ROUND = "round:Q"
VALUE = "value:Q"


def by_round(every: Mapping[str, Curve]) -> dict[int, dict[str, float]]:
    """What each client came to on all that it had learnt, in the rounds in which it was tested."""
    found: dict[int, dict[str, float]] = {}
    for model, curve in every.items():
        for number, value in zip(curve.rounds.tolist(), curve.learnt.tolist(), strict=True):
            if model != "server" and np.isfinite(value):
                found.setdefault(number, {})[model] = value
    return dict(sorted(found.items()))


def chart_of(name: str) -> alt.Chart:
    """A chart of the data of this name, which `spec` is given: Altair would check every row of its own."""
    return alt.Chart(alt.NamedData(name=name))


def spec(chart: Drawn, height: int = HEIGHT, **data: Rows) -> Spec:
    """What is drawn in the browser: as wide as its place, so many pixels high, with its data by name."""
    made: Spec = chart.properties(height=height).to_dict()
    datasets = {
        name: [{key: _plain(value) for key, value in row.items()} for row in rows] for name, rows in data.items()
    }
    return {**made, "datasets": datasets, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def _plain(value: Any) -> Any:
    """A number to four digits; nothing for one that is not finite."""
    if isinstance(value, float | np.floating):
        return float(f"{value:.4g}") if np.isfinite(value) else None
    return value


def scale_of(of: str) -> alt.Scale:
    """The scale of a quantity: accuracies go from 0 to 1, another as it will."""
    return alt.Scale(domain=[0, 1]) if of == "accuracy" else alt.Scale(zero=False)


def value_axis(of: str, field: str = VALUE) -> alt.Y:
    return alt.Y(field, title=of, scale=scale_of(of))


def round_axis(rounds: int) -> alt.X:
    """The axis of so many rounds, which are whole numbers from 1."""
    scale = alt.Scale(nice=False, domain=[0.5, rounds + 0.5])
    ticks = [*range(1, rounds + 1, max(1, -(-rounds // 12)))]
    return alt.X(ROUND, title="round", axis=alt.Axis(values=ticks, format="d", labelOverlap=True), scale=scale)


def heat(of: str) -> alt.Color:
    """The colours of a heat map of a quantity: they differ in lightness as well."""
    domain = [0, 1] if of == "accuracy" else alt.Undefined
    return alt.Color(VALUE, title=of, scale=alt.Scale(scheme="viridis", domain=domain))


def colour(field: str, names: Sequence[str], colours: Sequence[str] = COLOURS) -> alt.Color:
    domain = list(names)
    return alt.Color(
        f"{field}:N", sort=domain, title=None, scale=alt.Scale(domain=domain, range=colours[: len(domain)])
    )


def numbers() -> alt.Axis:
    """The axis of whole numbers in a row, some of them left out where there is no room."""
    return alt.Axis(labelAngle=0, labelOverlap=True)


def chosen(chart: Drawn, models: Sequence[str], what: str = "model ") -> Drawn:
    """The chart of one model, with a list to choose it from where there are several."""
    shown = alt.param(name="shown", value=models[0])
    if len(models) > 1:
        bind = alt.binding_select(options=list(models), labels=[model_name(model) for model in models], name=what)
        shown = alt.param(name="shown", value=models[0], bind=bind)
    return chart.transform_filter("datum.model == shown").add_params(shown)


def tip(field: str, title: str, form: str = ".3f") -> alt.Tooltip:
    return alt.Tooltip(field, title=title, format=form) if field.endswith(":Q") else alt.Tooltip(field, title=title)
