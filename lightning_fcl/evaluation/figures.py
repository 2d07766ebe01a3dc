"""The figures of a paper: what `rows.yaml` says of them, drawn from the results of its rows over seeds."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from lightning_fcl.errors import require
from lightning_fcl.evaluation.communication import BANDWIDTHS, communication_time, volumes
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.files import save_figure
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.evaluation.metrics import stream_accuracies, task_curves
from lightning_fcl.evaluation.panels import (
    Density,
    communication_panels,
    density_panels,
    experience_labels,
    experience_names,
    stream_accuracy_panels,
    task_panels,
    volume_panels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Results: TypeAlias = Mapping[str, Any]
Panels: TypeAlias = Mapping[str, Mapping[str, str]]
ResultsByRow: TypeAlias = Mapping[str, Sequence[Results]]


def figures_at(scale: str, figures: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are drawn at a scale: all that name none of their own under ``scales``, or this one among them."""
    return [figure for figure in figures if scale in figure.get("scales", [scale])]


def write_figures(out: Path, figures: Sequence[Mapping[str, Any]], results_by_row: ResultsByRow) -> list[Path]:
    """Draw the figures of a paper, without the panels whose rows were not all run: a line on stderr names those.

    Args:
        figures: Each has ``file``, the name of a PNG; ``kind``; ``panels``: for each panel's title, the row behind each
            line's label; and perhaps a ``title``, and the ``scales`` at which it is drawn. What has several seeds is
            drawn as mean and standard deviation. The kinds: ``stream_accuracy``, the server's after each experience;
            ``activation_density``, what `ActivationDensity` has recorded after the last experience, or with
            ``experiences: true`` after each of one row; ``average_accuracy``, average accuracy and forgetting after
            each task, mean over the clients (`task_curves`); ``communication``, the volume of each row and its time
            against the bandwidth (`lightning_fcl.evaluation.communication`); ``volume_by_round``.
        results_by_row: Contents of ``results.json`` of each seed of the rows that were run.
    """
    paths = []
    for figure in figures:
        every: Panels = figure["panels"]
        rows = dict.fromkeys(row for lines in every.values() for row in lines.values())
        missing = [row for row in rows if not results_by_row.get(row)]
        panels = {name: lines for name, lines in every.items() if not {*lines.values()} & {*missing}}
        if missing:
            what = f"Panels of figure {figure['file']} are" if panels else f"Figure {figure['file']} is"
            print(f"{what} left out: not run: {', '.join(missing)}.", file=sys.stderr)
        if not panels:
            continue
        drawn = _KINDS[figure["kind"] + (" of experiences" if figure.get("experiences") else "")]
        paths.append(save_figure(drawn(figure.get("title", ""), panels, results_by_row), inside(out, figure["file"])))
    return paths


def _of_each(
    panels: Panels, results_by_row: ResultsByRow, curve: Callable[[str, Sequence[Results]], T]
) -> dict[str, dict[str, T]]:
    """For each panel and label what a function makes of its row's results."""
    return {
        name: {label: curve(row, results_by_row[row]) for label, row in lines.items()} for name, lines in panels.items()
    }


def _padded(curves: Iterable[FloatArray]) -> FloatArray:
    """Curves of several seeds below each other; NaN where one has ended."""
    return np.asarray(require("pandas", "lines up curves").DataFrame(map(list, curves)), dtype=np.float64)


def _draw_accuracy(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    rows = dict.fromkeys(row for lines in panels.values() for row in lines.values())
    called = [experience_names(one["record"]) for row in rows for one in results_by_row[row]]
    longest = max(called, key=len)
    # Where the experiences are others in other runs, only their numbers are common to all.
    same = all(names == longest[: len(names)] for names in called)
    names = longest if same else [str(number + 1) for number in range(len(longest))]

    def after_each(row: str, results: Sequence[Results]) -> FloatArray:
        return _padded(stream_accuracies(one["record"]) for one in results)

    return stream_accuracy_panels(_of_each(panels, results_by_row, after_each), names, title)


def _draw_tasks(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    def after_each(row: str, results: Sequence[Results]) -> tuple[FloatArray, FloatArray]:
        accuracy, forgotten = zip(*(task_curves(one["record"]) for one in results), strict=True)
        if not max(map(len, accuracy)):
            raise ValueError(
                f"Expected clients with several tasks in the results of row {row} but none was tested. Let "
                "`ContinualMetrics` test the clients."
            )
        return _padded(accuracy), _padded(forgotten)

    return task_panels(_of_each(panels, results_by_row, after_each), title)


def _draw_communication(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    def in_all(row: str, results: Sequence[Results]) -> tuple[FloatArray, FloatArray]:
        volume = np.mean([volumes(one["record"]).sum(axis=1) for one in results], axis=0)
        times = [[communication_time(one["record"], bandwidth) for bandwidth in BANDWIDTHS] for one in results]
        return volume, np.mean(times, axis=0)

    return communication_panels(_of_each(panels, results_by_row, in_all), BANDWIDTHS, title)


def _draw_volumes(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    def of_rounds(row: str, results: Sequence[Results]) -> FloatArray:
        return _padded(volumes(one["record"]).sum(axis=0) for one in results)

    return volume_panels(_of_each(panels, results_by_row, of_rounds), title)


def _draw_density(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    return density_panels(_of_each(panels, results_by_row, lambda row, results: _densities(row, results)[-1]), title)


def _draw_densities(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    """Each panel's one row, a line for each experience."""
    drawn: dict[str, dict[str, Density]] = {}
    for name, lines in panels.items():
        (row,) = lines.values()
        labels = experience_labels([one["record"] for one in results_by_row[row]])
        drawn[name] = dict(zip(labels, _densities(row, results_by_row[row]), strict=False))
    return density_panels(drawn, title, ordered=True)


def _densities(row: str, results: Sequence[Results]) -> list[Density]:
    """The density of a row after each experience, mean over its seeds."""
    every = [one.get("densities", {}).get("experiences", []) for one in results]
    if not all(every):
        raise ValueError(
            f"Expected `densities` in the results of row {row} but got none. Add `ActivationDensity` to its callbacks "
            "and train to the end of an experience."
        )
    edges = results[0]["densities"]["edges"]
    return [(edges, np.mean([one["all"] for one in entries], axis=0)) for entries in zip(*every, strict=False)]


_KINDS = {
    "stream_accuracy": _draw_accuracy,
    "activation_density": _draw_density,
    "activation_density of experiences": _draw_densities,
    "average_accuracy": _draw_tasks,
    "communication": _draw_communication,
    "volume_by_round": _draw_volumes,
}
