"""Figures of a paper. `rows.yaml` specifies the figures, and the rows: named recipes whose runs the figures show."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.charts import Points, Spec, over_seeds, spec
from lightning_fcl.evaluation.curves import stream_accuracies, task_curves
from lightning_fcl.evaluation.metrics import AVERAGE_ACCURACY, FORGETTING, STREAM_ACCURACY
from lightning_fcl.evaluation.record import ACCURACY
from lightning_fcl.evaluation.summary import (
    BANDWIDTHS,
    communication_time,
    communication_volumes,
    experience_labels,
    experience_names,
)
from lightning_fcl.io.paths import safe_join

Runs: TypeAlias = Sequence[Mapping[str, Any]]
"""Runs of a row: the contents of ``results.json`` of each seed."""

Panels: TypeAlias = Mapping[str, Mapping[str, tuple[str, Runs]]]
"""For each panel title, a mapping from the label of a line to the name and the runs of the line's row."""

# Width of a panel in pixels, by the number of columns in the grid of panels.
_WIDTHS = {1: 640, 2: 400, 3: 280, 4: 215}


def write_figures(out: Path, figures: Sequence[Mapping[str, Any]], results_by_row: Mapping[str, Runs]) -> list[Path]:
    """Draw the figures of a paper and return the paths of their files.

    A panel is skipped if one of its rows was not run. The names of these rows are printed to stderr. A row with several
    seeds is drawn as the mean. The kinds ``stream_accuracy``, ``average_accuracy`` and ``volume_by_round`` also show
    the standard deviation.

    Args:
        out: Folder of the files.
        figures: Specifications of the figures. ``file`` is the name of a PNG file. ``kind`` is the kind of the figure.
            ``panels`` contains a mapping for each panel, by the title of the panel. The keys of the mapping are labels
            of lines, and the values are names of rows. Optional are ``title`` and ``scales``, the scales of runs that
            get this figure. The kinds are:

            - ``stream_accuracy``: stream accuracy of the server after each experience.
            - ``activation_density``: the densities recorded by `ActivationDensity` after the last experience. With
              ``experiences: true``, a panel has one row and shows its densities after each experience.
            - ``average_accuracy``: average accuracy and forgetting after each task, mean over the clients
              (`task_curves`).
            - ``communication``: communication volume of each row, and its communication time against the bandwidth
              (`lightning_fcl.evaluation.summary`).
            - ``volume_by_round``: communication volume of each round.
        results_by_row: Runs of each row that was run, by the name of the row.
    """
    paths = []
    for figure in figures:
        all_panels: Mapping[str, Mapping[str, str]] = figure["panels"]
        missing = dict.fromkeys(row for of in all_panels.values() for row in of.values() if not results_by_row.get(row))
        panels = {
            name: {label: (row, results_by_row[row]) for label, row in of.items()}
            for name, of in all_panels.items()
            if not {*of.values()} & {*missing}
        }
        if missing:
            subject = f"panels of figure {figure['file']}" if panels else f"figure {figure['file']}"
            print(f"Skipped {subject}, because these rows were not run: {', '.join(missing)}.", file=sys.stderr)
        if panels:
            draw = FIGURE_KINDS[figure["kind"] + (" of experiences" if figure.get("experiences") else "")]
            paths.append(charts.write_png(safe_join(out, figure["file"]), draw(panels, figure.get("title", ""))))
    return paths


def _points(panels: Panels, curve: Callable[[str, Runs], Points]) -> Points:
    """Return the points of all lines, with the panel and the label of the line. ``curve`` returns one line's points."""
    return [
        {"panel": panel, "line": label, **point}
        for panel, lines in panels.items()
        for label, (row, runs) in lines.items()
        for point in curve(row, runs)
    ]


def _faceted(layers: Sequence[alt.Chart], panels: Panels, height: int, columns: int = 0) -> alt.FacetChart:
    """Return a chart with the panels in a grid. All panels have the same layers and axes."""
    number = len(panels)
    columns = columns or (number if number <= 3 else 2 if number == 4 else 3 if number <= 9 else 4)
    chart = alt.layer(*layers).properties(width=_WIDTHS[min(columns, 4)], height=height)
    return chart.facet(alt.Facet("panel:N", title=None, sort=[*panels]), columns=columns)


def _names(points: Points) -> list[str]:
    return list(dict.fromkeys(point["line"] for point in points))


def _wrapped(name: str, letters: int = 34) -> str:
    return "\n".join(textwrap.wrap(name, letters, break_long_words=False))


def _names_of_equal_lines(points: Points) -> dict[str, str]:
    """Return a label for each line. Lines with equal points have the same label, which contains all their names."""
    points_by_line: dict[str, list[Any]] = {}
    for point in points:
        points_by_line.setdefault(point["line"], []).append({**point, "line": ""})
    groups: dict[str, list[str]] = {}
    for line, line_points in points_by_line.items():
        groups.setdefault(repr(line_points), []).append(line)
    return {line: _wrapped(", ".join(group)) for group in groups.values() for line in group}


def _merged(points: Points, names: dict[str, str]) -> Points:
    """Return the points with new names of lines. If several lines get the same name, only the first line is kept.

    Args:
        points: Points with the name of their line.
        names: New name of each line, by the old name.
    """
    first = {name: line for line, name in reversed(names.items())}
    return [{**p, "line": names[p["line"]]} for p in points if first[names[p["line"]]] == p["line"]]


def draw_accuracy(panels: Panels, title: str) -> Spec:
    """Return the figure of stream accuracies after each experience."""
    name_lists = [experience_names(run["record"]) for of in panels.values() for _, runs in of.values() for run in runs]
    names = max(name_lists, key=len)
    # If the runs have different names for the experiences, the axis shows numbers.
    if any(names[: len(other)] != other for other in name_lists):
        names = [str(number + 1) for number in range(len(names))]
    names = [_wrapped(name, 14) for name in names]
    rows = _points(panels, lambda _, runs: over_seeds(stream_accuracies(run["record"]) for run in runs))
    axis = alt.Axis(labelAngle=-30 if sum(map(len, names)) * len(panels) > 120 else 0)
    x = alt.X("experience:O", title="after experience", sort=names, scale=alt.Scale(domain=names), axis=axis)
    base, scale = charts.get_chart("rows").encode(x=x), charts.quantity_scale(ACCURACY)
    layers = charts.small_multiples(base, _names(rows), STREAM_ACCURACY.heading, scale, rows)
    rows = [{**row, "experience": names[row["round"] - 1]} for row in rows]
    return spec(_faceted(layers, panels, 230).properties(title=title), rows=rows)


def draw_tasks(panels: Panels, title: str) -> Spec:
    """Return the figure of average accuracy and forgetting after each task."""
    for row, runs in (line for of in panels.values() for line in of.values()):
        if not any(len(task_curves(run["record"])[0]) for run in runs):
            raise InvalidValueError(
                f"Expected a tested client with several tasks in the results of row {row}, but there is none.",
                hint='Run the row with `ContinualMetrics(clients="all")`.',
                argument="results",
                value=row,
            )
    accuracy = _points(panels, lambda _, runs: over_seeds(task_curves(run["record"])[0] for run in runs))
    forgetting_points = _points(panels, lambda _, runs: over_seeds(task_curves(run["record"])[1] for run in runs))
    x, names = charts.round_axis(max(point["round"] for point in accuracy), "after task"), _names(accuracy)
    parts = []
    for data, metric, rows in (
        ("accuracy", AVERAGE_ACCURACY, accuracy),
        ("forgetting", FORGETTING, forgetting_points),
    ):
        base, scale = charts.get_chart(data), alt.Scale(zero=False)
        zero = [base.mark_rule().encode(y=alt.datum(0))] if metric is FORGETTING else []
        layers = charts.small_multiples(base.encode(x=x), names, f"{metric.heading}, mean over clients", scale, rows)
        parts.append(_faceted([*layers, *zero], panels, 280, columns=max(len(panels), 2)))
    combined_chart = alt.hconcat(*parts) if len(panels) == 1 else alt.vconcat(*parts)
    return spec(combined_chart.properties(title=title), accuracy=accuracy, forgetting=forgetting_points)


def draw_communication(panels: Panels, title: str) -> Spec:
    """Return the figure of each row's communication volume, and of each row's communication time by bandwidth."""

    def volume(row: str, runs: Runs) -> Points:
        """Return the stacked bars of uploads and downloads in megabytes. Values are means over the seeds."""
        upload_mb, download_mb = (
            np.mean([communication_volumes(run["record"]).sum(axis=1) for run in runs], axis=0) / 1e6
        )
        return [
            {"direction": "upload", "begin": 0.0, "end": upload_mb},
            {"direction": "download", "begin": upload_mb, "end": upload_mb + download_mb},
        ]

    def times(row: str, runs: Runs) -> Points:
        """Return the communication time in seconds at each bandwidth, mean over the seeds. A time of 0 becomes NaN."""
        seconds = [[communication_time(run["record"], bandwidth) for bandwidth in BANDWIDTHS] for run in runs]
        means = zip(BANDWIDTHS, np.mean(seconds, axis=0), strict=True)
        return [{"bandwidth": bandwidth, "value": value or np.nan} for bandwidth, value in means]

    shade = alt.Opacity("direction:N", scale=alt.Scale(domain=["upload", "download"], range=[1, 0.45]), legend=None)
    begin = alt.X("begin:Q", title="communication of all clients (MB): uploads dark, downloads light")
    label = "datum.value >= 1e6 ? datum.value / 1e6 + ' MB/s' : datum.value / 1e3 + ' KB/s'"
    axis = alt.Axis(values=[*BANDWIDTHS], labelAngle=-30, labelExpr=label)
    bandwidth = alt.X("bandwidth:Q", title="bandwidth of a client", scale=alt.Scale(type="log"), axis=axis)
    parts: list[alt.HConcatChart] = []
    data: dict[str, Points] = {}
    for panel, lines in panels.items():
        bars, points = _points({panel: lines}, volume), _points({panel: lines}, times)
        names = _names_of_equal_lines([*bars, *points])
        bars = [{**bar, "row": _wrapped(bar["line"], 28), "line": names[bar["line"]]} for bar in bars]
        points = _merged(points, names)
        data |= {f"volumes {panel}": bars, f"times {panel}": points}
        base = charts.get_chart(f"volumes {panel}").encode(y=alt.Y("row:N", title=None, sort=None))
        bar_chart = base.mark_bar().encode(
            x=begin, x2="end:Q", color=charts.color_scale("line", _names(bars)), opacity=shade
        )
        total = base.transform_filter("datum.direction == 'download'").mark_text(align="left", dx=4)
        total = total.encode(x="end:Q", text=alt.Text("end:Q", format=",.4~r"))
        base = charts.get_chart(f"times {panel}").encode(x=bandwidth)
        scale = alt.Scale(type="log")
        _, *layers = charts.small_multiples(base, _names(bars), "communication time (s)", scale, points, "bandwidth")
        panel_charts = alt.layer(bar_chart, total), alt.layer(*layers)
        sized = [chart.properties(width=400, height=max(200, 22 * len(lines))) for chart in panel_charts]
        parts.append(alt.hconcat(*sized).properties(title=alt.Title(panel, anchor="start", fontWeight="bold")))
    combined_chart = alt.vconcat(*parts).resolve_scale(
        color="independent", shape="independent", strokeDash="independent"
    )
    return spec(combined_chart.properties(title=title), **data)


def draw_volumes(panels: Panels, title: str) -> Spec:
    """Return the figure of the communication volume of each round."""
    rows = _points(
        panels, lambda _, runs: over_seeds(communication_volumes(run["record"]).sum(axis=0) / 1e6 for run in runs)
    )
    rows = _merged(rows, _names_of_equal_lines(rows))
    longest = max(row["round"] for row in rows)
    base = charts.get_chart("rows").encode(x=charts.round_axis(longest))
    layers = charts.small_multiples(base, _names(rows), "MB per round", alt.Scale(zero=True), rows)
    return spec(_faceted(layers, panels, 230).properties(title=title), rows=rows)


def draw_densities(panels: Panels, title: str, experiences: bool = False) -> Spec:
    """Return the figure of activation densities, mean over the seeds.

    Each row has one line: the density after the last experience of the row. If ``experiences``, each panel has one row,
    with a line for each experience.
    """
    rows: Points = []
    for panel, lines in panels.items():
        for label, (row, runs) in lines.items():
            density_entries = [run.get("densities", {}).get("experiences", []) for run in runs]
            if not all(density_entries):
                raise MissingValueError(
                    f"Expected `densities` in the results of each run of row {row}, but at least one run has none.",
                    hint="Add `ActivationDensity` to the callbacks of the row, and train until an experience ends.",
                    argument="densities",
                )
            means = [
                np.mean([one["all"] for one in entries], axis=0) for entries in zip(*density_entries, strict=False)
            ]
            names = experience_labels([run["record"] for run in runs]) if experiences else [label]
            for name, density in zip(names, means if experiences else means[-1:], strict=False):
                points = charts.density_points(runs[0]["densities"]["edges"], density)
                rows += [{"panel": panel, "line": name, **point} for point in points]
    lines_chart = _faceted([charts.density_lines(_names(rows), ordered=experiences)], panels, 200)
    return spec(lines_chart.properties(title=title), rows=rows)


FIGURE_KINDS: Mapping[str, Callable[[Panels, str], Spec]] = {
    "stream_accuracy": draw_accuracy,
    "activation_density": draw_densities,
    "activation_density of experiences": partial(draw_densities, experiences=True),
    "average_accuracy": draw_tasks,
    "communication": draw_communication,
    "volume_by_round": draw_volumes,
}
