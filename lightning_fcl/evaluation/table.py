"""Tables with the metrics of runs and the values of a paper, stored in ``table.json``.

The runs of a row differ only in the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from lightning_fcl import __version__
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.curves import task_curves
from lightning_fcl.evaluation.metrics import find_metric
from lightning_fcl.evaluation.statistics import SeedStatistics, seed_statistics
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_json

TableFormat: TypeAlias = Literal["csv", "markdown", "latex"]
"""Formats of a table that compares runs."""

NEAR_TOLERANCE = 0.05
"""Default of the largest difference from the expected value at which a mean counts as near."""

_FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the values of one metric in one row, over several seeds.

    Args:
        values: Value of the metric, by seed. Empty if only the paper reports the metric.
        paper: Value of the paper, or the expected value. None if there is no such value.
        tolerance: Largest difference from the expected value at which the mean counts as near.
    """

    values: Mapping[int, float]
    paper: float | None = None
    tolerance: float = NEAR_TOLERANCE

    @cached_property
    def statistics(self) -> SeedStatistics | None:
        """Statistics over the seeds. None if there is no value."""
        return seed_statistics(self.values.values()) if self.values else None

    @property
    def mean(self) -> float | None:
        """Mean over the seeds. None if there is no value."""
        return self.statistics.mean if self.statistics else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the seeds (divided by n - 1). 0 for one seed, None if there is no value."""
        return (self.statistics.std or 0.0) if self.statistics else None

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.values)

    @property
    def deviation(self) -> float:
        """Absolute difference of the mean and the paper's value, both rounded to three decimals.

        Infinite if the mean or the paper's value is missing.
        """
        if self.mean is None or self.paper is None:
            return float("inf")
        return abs(round(self.mean, 3) - round(self.paper, 3))

    @property
    def verdict(self) -> str:
        """Agreement with the paper's value: ``near``, ``spread`` or ``outside``. Empty if the paper has no value.

        ``near``: the difference is at most the tolerance. ``spread``: the difference is larger, but at most two
        standard deviations over the seeds. ``outside``: otherwise, and if the metric was not measured.
        """
        if self.paper is None:
            return ""
        in_spread = self.n > 1 and self.deviation <= 2 * (self.std or 0.0)
        return "near" if self.deviation <= self.tolerance + 1e-9 else "spread" if in_spread else "outside"

    def text(self, name: str, mark: str = "") -> str:
        """Return the cell as text ``ours ± std (paper)``.

        The text has no ± if there are fewer than two seeds, or if a size in bytes is the same for all seeds. Without a
        value of the paper, the text has no parentheses.
        """
        spread = f" ± {metric_number(name, self.std)}" if self.n > 1 and (self.std or not is_size(name)) else ""
        paper = f" ({metric_number(name, self.paper)})" if self.paper is not None else ""
        return f"{mark}{metric_number(name, self.mean)}{mark}{spread}{paper}"


class VerdictCounts(NamedTuple):
    """Numbers of values in a table, by agreement with the paper's values.

    Each value is near the paper's value, within two standard deviations of the paper's value, or outside.
    """

    num_near: int
    num_within_spread: int
    num_outside: int

    @property
    def verdict(self) -> str:
        """Verdict on a table: whether the table reproduces the paper's values.

        Reproduced: at most 10 % of the values are outside. Not reproduced: more than 50 % are outside. Otherwise, the
        table is partly reproduced. Without values, the verdict is ``not compared``.
        """
        if not sum(self):
            return "not compared"
        share = self.num_outside / sum(self)
        return "reproduced" if share <= 0.1 else "not reproduced" if share > 0.5 else "partly reproduced"


@dataclass(frozen=True)
class Table:
    """The rows of a paper's table, with a description of the runs.

    Args:
        paper: Name of the paper's recipes.
        scale: Scale of the runs. ``paper`` is the paper's own scale.
        command: Command that wrote the table.
        versions: Version of each package that the runs used, by the name of the package.
        machine: Machine of the runs.
        seconds: Sum of the durations of the runs.
        rows: Cells by metric, for each row name.
    """

    paper: str
    scale: str
    command: str
    versions: Mapping[str, str]
    machine: str
    seconds: float
    rows: Mapping[str, Mapping[str, Cell]]

    @classmethod
    def from_results(cls, results: Sequence[Mapping[str, Any]], paper: str, scale: str, command: str) -> Table:
        """Return the table of some runs.

        Args:
            results: Contents of ``results.json`` of the runs.
            paper: Name of the paper's recipes.
            scale: Scale of the runs.
            command: Command that wrote the table.
        """
        names = dict.fromkeys(name for one in results for name in one["versions"])
        return cls(
            paper,
            scale,
            command,
            {name: _distinct(one["versions"][name] for one in results if name in one["versions"]) for name in names},
            _distinct(one["machine"] for one in results),
            round(sum(one["seconds"] for one in results), 1),
            cells(results),
        )

    @property
    def seeds(self) -> list[int]:
        """All seeds of the table. A row may have only some of these seeds."""
        return sorted({seed for row in self.rows.values() for cell in row.values() for seed in cell.values})

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def paper_cells(self) -> list[tuple[str, str, Cell]]:
        """Row, metric and cell of each value that the paper reports."""
        return [(row, name, c) for row, of in self.rows.items() for name, c in of.items() if c.paper is not None]

    @property
    def near_text(self) -> str:
        """Description of values that are near the expected values, such as "within 0.05"."""
        return "within the tolerance of the metric" if self.tolerance is None else f"within {self.tolerance:g}"

    @property
    def tolerance(self) -> float | None:
        """Tolerance of all expected values. None if metrics have different tolerances."""
        tolerances = {cell.tolerance for _, _, cell in self.paper_cells} or {NEAR_TOLERANCE}
        return tolerances.pop() if len(tolerances) == 1 else None

    @property
    def verdict_counts(self) -> VerdictCounts:
        """Numbers of values by their agreement with the paper."""
        verdicts = [cell.verdict for _, _, cell in self.paper_cells]
        return VerdictCounts(
            num_near=verdicts.count("near"),
            num_within_spread=verdicts.count("spread"),
            num_outside=verdicts.count("outside"),
        )

    def verdict_text(self) -> str:
        """Return the verdict, the number of values in each group, and a line for each value that is outside.

        The text is empty if there are no expected values.
        """
        counts = self.verdict_counts
        if not sum(counts):
            return ""
        text = f"Verdict: {counts.verdict}. Of {sum(counts)} expected values, {counts.num_near} are {self.near_text}, "
        text += f"{counts.num_within_spread} within two standard deviations, and {counts.num_outside} outside."
        outside_cells = [(row, name, cell) for row, name, cell in self.paper_cells if cell.verdict == "outside"]
        lines = [f"Outside: {row}, {name}: {cell.text(name)}" for row, name, cell in outside_cells]
        return "\n".join([text, *lines])

    def with_tolerance(self, tolerance: float | Mapping[str, float]) -> Table:
        """Return the table with other tolerances of the expected values.

        Args:
            tolerance: Tolerance of all metrics, or tolerances by the name of the metric. Metrics without a tolerance
                have the default, `NEAR_TOLERANCE`.
        """

        def of(name: str) -> float:
            return tolerance.get(name, NEAR_TOLERANCE) if isinstance(tolerance, Mapping) else tolerance

        rows = {
            row: {n: replace(cell, tolerance=of(n)) for n, cell in of_row.items()} for row, of_row in self.rows.items()
        }
        return replace(self, rows=rows)

    def select_metrics(self, metrics: Sequence[str]) -> Table:
        """Return the table with only some metrics, in the given order."""
        if unknown := sorted({*metrics} - {*self.metrics}):
            raise InvalidValueError(
                f"Expected `metrics` to be among {', '.join(self.metrics)}, but got {', '.join(unknown)}.",
                argument="metrics",
            )
        rows = {row: {name: of[name] for name in metrics if name in of} for row, of in self.rows.items()}
        return replace(self, rows=rows)


def cells(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Cell]]:
    """Return a cell for each row and metric of some runs, as ``{row: {metric: cell}}``.

    Metrics that only the paper reports have a cell without values. The row of a run without a recipe is named after the
    command of the run.
    """
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for result in results:
        row, seed = result["recipe"]["row"] if result["recipe"] else result["command"], result["seed"]
        if seed in rows.setdefault(row, {}):
            raise InvalidValueError(
                f"Expected one run for each row and seed, but got two runs of row {row} with seed {seed}.",
                hint="Leave out one of the two runs.",
                argument="seed",
                value=seed,
            )
        rows[row][seed] = result
    cells_by_row: dict[str, dict[str, Cell]] = {}
    for row, runs in rows.items():
        names = dict.fromkeys(name for run in runs.values() for name in (*run["metrics"], *run["expected"]))
        papers = {name: value for run in reversed(runs.values()) for name, value in run["expected"].items()}
        values = {
            name: {s: run["metrics"][name] for s, run in runs.items() if name in run["metrics"]} for name in names
        }
        cells_by_row[row] = {name: Cell(values[name], papers.get(name)) for name in names}
    return cells_by_row


def with_tasks(table: Table, results: Mapping[str, Sequence[Mapping[str, Any]]], gains: Mapping[str, Any]) -> Table:
    """Return a table with two more metrics after each task: the clients' average accuracy, and the gain of some rows.

    The gain of a row is its accuracy divided by the mean accuracy of other rows, minus 1. Gains are left out if a row
    of ``of`` or ``over`` was not run.

    Args:
        table: Table without these metrics.
        results: Contents of ``results.json`` of each seed, by row.
        gains: A mapping with three keys. ``of``: rows that have a gain. ``over``: rows of the mean accuracy. ``paper``:
            the paper's gain after each task.
    """
    curves = {row: {one["seed"]: task_curves(one["record"])[0] for one in runs} for row, runs in results.items()}
    cells_by_row = {row: _cells("accuracy", of) for row, of in curves.items()}
    if {*gains["of"], *gains["over"]} <= {*results}:
        for row in gains["of"]:
            seeds = [seed for seed in curves[row] if all(seed in curves[other] for other in gains["over"])]
            means = {seed: np.mean([curves[other][seed] for other in gains["over"]], axis=0) for seed in seeds}
            cells_by_row[row] |= _cells("gain", {s: curves[row][s] / means[s] - 1 for s in seeds}, gains["paper"])
    return replace(table, rows={row: {**cells, **cells_by_row[row]} for row, cells in table.rows.items()})


def _cells(name: str, curves: Mapping[int, FloatArray], paper: Sequence[float | None] = ()) -> dict[str, Cell]:
    """Return a cell for each task, by metric name (``gain_after_2/clients``). Tasks without a value are left out."""
    longest = max(map(len, curves.values()), default=0)
    papers = [*paper, *[None] * longest]
    values = [
        {seed: float(curve[t]) for seed, curve in curves.items() if np.isfinite(curve[t : t + 1]).any()}
        for t in range(longest)
    ]
    return {f"{name}_after_{t + 1}/clients": Cell(of, papers[t]) for t, of in enumerate(values) if of}


def write_table(folder: str | Path, table: Table) -> tuple[Path, Path]:
    """Write ``table.json`` and ``table.md``, and return the paths of both files."""
    as_json = write_table_json(folder, table)
    lines = [[row, *(of[n].text(n) if n in of else "-" for n in table.metrics)] for row, of in table.rows.items()]
    note = (
        "Mean ± standard deviation over the seeds, with the expected value in parentheses. A value without ± has one "
    )
    note += "seed, or is a size that is equal for all seeds."
    note += f" Written by lightning-fcl {__version__}."
    markdown = f"{markdown_table(['', *map(metric_title, table.metrics)], lines)}\n\n{note}\n"
    return as_json, write_atomic(Path(folder) / "table.md", markdown)


def write_table_json(folder: str | Path, table: Table) -> Path:
    """Write ``table.json``, and return its path."""
    content = {
        "format": _FORMAT,
        **{name: value for name, value in vars(table).items() if name != "rows"},
        "seeds": table.seeds,
        "rows": {row: {name: _plain(cell) for name, cell in of.items()} for row, of in table.rows.items()},
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomic(folder / "table.json", json.dumps(content, indent=1) + "\n")


def read_table(path: str | Path) -> Table:
    """Return the table in a ``table.json``, after checking the content of the file."""
    path, hint = Path(path), "Write the table with `lightning-fcl reproduce`."
    content = read_json(path, "a table in ", _FORMAT, hint)
    try:
        rows = {
            row: {
                name: Cell(
                    {int(seed): float(value) for seed, value in cell["values"].items()},
                    None if cell["paper"] is None else float(cell["paper"]),
                    float(cell.get("tolerance", NEAR_TOLERANCE)),
                )
                for name, cell in of.items()
            }
            for row, of in content["rows"].items()
        }
        return Table(**{field.name: content[field.name] for field in fields(Table)} | {"rows": rows})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {path} to contain a table, but reading it failed: {error!r}.", hint=hint, value=path
        ) from error


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns. Columns of numbers are right-aligned, except the first column."""
    columns = []
    for number, column in enumerate(zip(head, *lines, strict=True)):
        cells = [cell.replace("|", "\\|") for cell in column]
        right = number > 0 and all(cell.startswith(tuple("+-0123456789")) for cell in cells[1:])
        width = max(3, *map(len, cells))
        cells.insert(1, "-" * (width - right) + ":" * right)
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def metric_title(name: str) -> str:
    """Return the heading of a metric: the symbol of the metric in papers, or the name of the metric, and the model.

    Example:
        >>> metric_title("general_accuracy/server"), metric_title("F_2/clients")
        ('A_gen server', 'F_2 clients')
    """
    metric_name, _, model = name.rpartition("/")
    return f"{metric_symbol(metric_name)} {model}".strip()


def metric_symbol(metric_name: str) -> str:
    """Return the symbol that papers use for a metric, or the metric's name if there is no symbol.

    Example:
        >>> metric_symbol("general_accuracy"), metric_symbol("my_metric")
        ('A_gen', 'my_metric')
    """
    metric = find_metric(metric_name)
    return metric.title if metric is not None and metric.title else metric_name


def is_size(name: str) -> bool:
    """Return whether a metric is a number of bytes."""
    metric = find_metric(name)
    return metric is not None and metric.unit == "B"


def metric_number(name: str, value: float | None) -> str:
    """Return the value of a metric as tables show it: with three decimals, sizes in MB."""
    if value is None:
        return "-"
    return f"{value / 1e6:.3f} MB" if is_size(name) else f"{value:.3f}"


def _plain(cell: Cell) -> dict[str, Any]:
    summary = {"mean": cell.mean, "std": cell.std, "n": cell.n, "paper": cell.paper}
    tolerance = {} if cell.tolerance == NEAR_TOLERANCE else {"tolerance": cell.tolerance}
    return {**summary, **tolerance, "values": {str(seed): value for seed, value in sorted(cell.values.items())}}


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
