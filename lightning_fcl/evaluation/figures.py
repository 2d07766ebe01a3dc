"""The figures of a paper: what `rows.yaml` says of them, drawn from the results of its rows over seeds."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from lightning_fcl.errors import did_you_mean, require
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
from lightning_fcl.evaluation.report import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Panels: TypeAlias = Mapping[str, Mapping[str, Any]]
ResultsByRow: TypeAlias = Mapping[str, Sequence[Results]]

__all__ = ["check_figures", "figures_at", "write_figures"]

_KEYS = {"file", "kind", "title", "panels", "of", "experiences", "scales"}


def figures_at(scale: str, figures: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are drawn at a scale: all that name none of their own under ``scales``, or this one among them.

    Example:
        >>> figures_at("small", [{"file": "a.png"}, {"file": "b.png", "scales": ["paper"]}])
        [{'file': 'a.png'}]
    """
    return [figure for figure in figures if scale in figure.get("scales", [scale])]


def check_figures(figures: Sequence[Mapping[str, Any]], rows: Iterable[str]) -> None:
    """Refuse figures that could not be drawn, before anything is run for them.

    Args:
        figures: What `write_figures` takes.
        rows: Names of all rows of the paper.

    Raises:
        ValueError: If an entry is missing or not known, a kind is not known, or a row does not exist.

    Example:
        >>> figure = {"file": "a.png", "kind": "stream_accuracy", "panels": {"WESAD": {"with plasticity": "FedIPP"}}}
        >>> check_figures([figure], ["FedIP"])
        Traceback (most recent call last):
        ValueError: Expected the rows of figure a.png to be among FedIP but got FedIPP. Did you mean FedIP?
    """
    known = list(rows)
    for figure in figures:
        name = figure.get("file", "without `file`")
        if missing := sorted({"file", "kind", "panels"} - figure.keys()):
            raise ValueError(f"Expected figure {name} to have `{missing[0]}` but got {', '.join(figure)}.")
        if unknown := sorted(figure.keys() - _KEYS):
            raise ValueError(f"Expected figure {name} to have {', '.join(sorted(_KEYS))} but got {', '.join(unknown)}.")
        if figure["kind"] not in _KINDS:
            raise ValueError(f"Expected `kind` of figure {name} to be {', '.join(_KINDS)} but got {figure['kind']}.")
        if inside(Path(), name).parent != Path() or not name.endswith(".png"):
            raise ValueError(f"Expected `file` of figures to be a name that ends in .png but got {name}.")
        panels = figure["panels"]
        if not panels or not isinstance(panels, Mapping) or not all(isinstance(of, Mapping) for of in panels.values()):
            raise ValueError(
                f"Expected `panels` of figure {name} to give for each panel's title its lines, label: row, but got "
                f"{panels}."
            )
        for panel in _panels(figure).values():
            for row in panel["lines"].values():
                if row not in known:
                    raise ValueError(
                        f"Expected the rows of figure {name} to be among {', '.join(known)} but got {row}."
                        f"{did_you_mean(row, known)}"
                    )
            if panel["experiences"] and len(panel["lines"]) != 1:
                raise ValueError(
                    f"Expected one row in each panel of figure {name}, whose lines are its experiences, but got "
                    f"{', '.join(panel['lines'])}."
                )


def write_figures(
    out: Path, figures: Sequence[Mapping[str, Any]], results_by_row: Mapping[str, Sequence[Results]]
) -> list[Path]:
    """Draw the figures of a paper, without the panels whose rows were not all run: a line on stderr names those.

    Args:
        out: Folder to write to.
        figures: Each has ``file``, the name of a PNG; ``kind``; ``panels``: for each panel's title, the row behind each
            line's label; and perhaps a ``title``, and the ``scales`` at which it is drawn. The kind ``stream_accuracy``
            draws the server's after each experience, mean and standard deviation over the seeds. The kind
            ``activation_density`` draws the mean over the seeds of what `ActivationDensity` has recorded after the last
            experience: ``of: all`` test samples, or those of a group or an owner by its name, or where both have that
            name ``of: group 1``. With ``experiences: true`` it draws the row's density after each experience. A panel
            may have an ``of`` or an ``experiences`` of its own, beside its ``lines``. The kind ``average_accuracy``
            draws average accuracy and forgetting after each task, mean over the clients (`task_curves`), over the seeds
            as ``stream_accuracy``. The kind ``communication`` draws the volume of each row and its communication time
            against the bandwidth (`lightning_fcl.evaluation.communication`), mean over the seeds,
            ``volume_by_round`` the volume of each
            round.
        results_by_row: Contents of ``results.json`` of each seed of the rows that were run.

    Returns:
        The paths of the figures.

    Raises:
        ValueError: If figures are not understood, or the results of a row lack what they show.
    """
    paths = []
    for figure in figures:
        every = _panels(figure)
        rows = dict.fromkeys(row for panel in every.values() for row in panel["lines"].values())
        missing = [row for row in rows if not results_by_row.get(row)]
        panels = {name: of for name, of in every.items() if not {*of["lines"].values()} & {*missing}}
        if missing:
            what = f"Panels of figure {figure['file']} are" if panels else f"Figure {figure['file']} is"
            print(f"{what} left out: not run: {', '.join(missing)}.", file=sys.stderr)
        if not panels:
            continue
        draw = _KINDS[figure["kind"]]
        paths.append(save_figure(draw(figure.get("title", ""), panels, results_by_row), inside(out, figure["file"])))
    return paths


def _panels(figure: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every panel with its lines, and what it shows if not the figure's own."""
    result = {}
    for title, panel in figure["panels"].items():
        own = panel if isinstance(panel.get("lines"), Mapping) else {"lines": panel}
        of, experiences = own.get("of", figure.get("of", "all")), own.get("experiences", figure.get("experiences"))
        lines = {str(label): row for label, row in own["lines"].items()}
        result[str(title)] = {"lines": lines, "of": str(of), "experiences": bool(experiences)}
    return result


def _of_each(
    panels: Panels, results_by_row: ResultsByRow, curve: Callable[[str, Sequence[Results]], T]
) -> dict[str, dict[str, T]]:
    """For each panel and label what a function makes of its row's results."""
    return {
        name: {label: curve(row, results_by_row[row]) for label, row in panel["lines"].items()}
        for name, panel in panels.items()
    }


def _padded(curves: Iterable[FloatArray]) -> FloatArray:
    """Curves of several seeds below each other; NaN where one has ended."""
    return np.asarray(require("pandas", "lines up curves").DataFrame(map(list, curves)), dtype=np.float64)


def _draw_accuracy(title: str, panels: Panels, results_by_row: ResultsByRow) -> "Figure":
    rows = dict.fromkeys(row for panel in panels.values() for row in panel["lines"].values())
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
    drawn: dict[str, dict[str, Density]] = {}
    for name, panel in panels.items():
        drawn[name] = {}
        for label, row in panel["lines"].items():
            results = results_by_row[row]
            last = min(len(_entries(row, one)) for one in results) - 1
            if not panel["experiences"]:
                drawn[name][label] = _mean(row, results, last, panel["of"])
                continue
            names = experience_labels([one["record"] for one in results])
            for number in range(last + 1):
                drawn[name][names[number]] = _mean(row, results, number, panel["of"])
    return density_panels(drawn, title, ordered=all(panel["experiences"] for panel in panels.values()))


def _mean(row: str, results: Sequence[Results], number: int, of: str) -> Density:
    """A density of a row after an experience, mean over its seeds."""
    found = [_select(row, _entries(row, one)[number], of) for one in results]
    return results[0]["densities"]["edges"], np.mean(found, axis=0)


def _entries(row: str, results: Results) -> Sequence[Mapping[str, Any]]:
    entries: Sequence[Mapping[str, Any]] = results.get("densities", {}).get("experiences", [])
    if not entries:
        raise ValueError(
            f"Expected `densities` in the results of row {row} but got none. Add `ActivationDensity` to its callbacks "
            "and train to the end of an experience."
        )
    return entries


def _select(row: str, entry: Mapping[str, Any], of: str) -> list[float]:
    """The density over all test samples, or those of a group or an owner."""
    kinds = {"group": entry["groups"], "owner": entry["owners"]}
    found = [(kind, kinds[kind][of]) for kind in kinds if of in kinds[kind]]
    kind, _, name = of.partition(" ")
    if of == "all":
        found = [("", entry["all"])]
    elif kind in kinds and name in kinds[kind]:
        found = [(kind, kinds[kind][name])]
    if not found:
        names = ", ".join(["all", *entry["groups"], *entry["owners"]])
        raise ValueError(f"Expected `of` to be one of {names}, as row {row} has them, but got {of}.")
    if len(found) > 1:
        raise ValueError(f"Expected `of` to be `group {of}` or `owner {of}`, as row {row} has both, but got {of}.")
    density: list[float] = found[0][1]
    return density


_KINDS = {
    "stream_accuracy": _draw_accuracy,
    "activation_density": _draw_density,
    "average_accuracy": _draw_tasks,
    "communication": _draw_communication,
    "volume_by_round": _draw_volumes,
}
