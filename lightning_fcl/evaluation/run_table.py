"""Tables that compare any runs: mean, standard deviation, confidence interval and paired tests of each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import TYPE_CHECKING, Any

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.comparison import RunsByName
from lightning_fcl.evaluation.markup import LATEX, Markup
from lightning_fcl.evaluation.metrics import DOWNLOAD_BYTES, UPLOAD_BYTES, overall_metrics
from lightning_fcl.evaluation.record import get_quantities
from lightning_fcl.evaluation.run_data import make_frame
from lightning_fcl.evaluation.statistics import (
    MIN_SEEDS,
    SIGNIFICANCE,
    SeedStatistics,
    holm_correction,
    paired_p_value,
    seed_statistics,
)
from lightning_fcl.evaluation.summary import HEADLINES
from lightning_fcl.evaluation.table import TableFormat, is_size, markdown_table, metric_number, metric_title
from lightning_fcl.validation import did_you_mean, one_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunTable:
    """Metrics of several rows over seeds. A row contains the runs of one recipe with several seeds.

    Args:
        values: Value of each metric for each seed, by row and metric.
        searched: Value of each searched option, by row and option. Empty for rows that are not part of a sweep.
        metrics: Metrics of the table, in their order.
        reference: Row that each other row is compared with.
    """

    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    searched: Mapping[str, Mapping[str, Any]]
    metrics: tuple[str, ...]
    reference: str

    @classmethod
    def from_runs(
        cls, groups: RunsByName, metrics: Sequence[str] | None = None, reference: str | None = None
    ) -> RunTable:
        """Return the table of some runs.

        Args:
            groups: Contents of ``results.json`` of each seed, for each row, as `runs_by_name` returns them.
            metrics: Names of metrics in ``results.json``. Default: the metrics of the server, of the mean over clients
                and of the whole federation.
            reference: Row that each other row is compared with. Default: the first row.

        Raises:
            InvalidValueError: If two runs of a row have the same seed.
            UnknownNameError: If no run has one of the metrics, or if there is no such reference.
        """
        names = dict.fromkeys(name for runs in groups.values() for run in runs for name in run["metrics"])
        for name in metrics or ():
            if name not in names:
                raise UnknownNameError(
                    f"Expected `metrics` to be metrics of the runs, but got {name}.",
                    hint=did_you_mean(name, names),
                    argument="metrics",
                    value=name,
                )
        if reference is not None:
            one_of([*groups], reference=reference)
        selected = metrics or overall_metrics(names)
        values: dict[str, dict[str, dict[int, float]]] = {}
        for row, runs in groups.items():
            seeds = [run["seed"] for run in runs]
            if (repeated := next((seed for seed in seeds if seeds.count(seed) > 1), None)) is not None:
                raise InvalidValueError(
                    f"Expected one run for each seed in {row}, but got several with seed {repeated}.",
                    argument="seed",
                    value=repeated,
                )
            values[row] = {
                name: {run["seed"]: run["metrics"][name] for run in runs if name in run["metrics"]} for name in selected
            }
        searched = {row: runs[0].get("searched", {}) for row, runs in groups.items()}
        return cls(values, searched, tuple(selected), reference or next(iter(groups)))

    @property
    def options(self) -> list[str]:
        """Names of the searched options of all rows."""
        return list(dict.fromkeys(option for of in self.searched.values() for option in of))

    @cached_property
    def statistics(self) -> dict[str, dict[str, SeedStatistics]]:
        """Statistics over seeds, by row and metric. A metric without values in a row is left out."""
        return {
            row: {name: seed_statistics(of[name].values()) for name in self.metrics if of[name]}
            for row, of in self.values.items()
        }

    @cached_property
    def p_values(self) -> dict[str, dict[str, float]]:
        """P-values by metric and row.

        A p-value belongs to the paired t-test of the row against the reference, with the correction of Holm (1979) for
        the rows of the table. Rows with fewer than `MIN_SEEDS` seeds in common with the reference are left out.
        """
        result = {}
        for name in self.metrics:
            reference = self.values[self.reference][name]
            tests = {
                row: p_value
                for row, of in self.values.items()
                if row != self.reference and (p_value := paired_p_value(of[name], reference)) is not None
            }
            result[name] = holm_correction(tests)
        return result

    def to_frame(self) -> pd.DataFrame:
        """Return the table as a DataFrame with a line for each row and metric.

        The columns are ``row``, each searched option, ``metric``, ``n`` (number of seeds), ``mean``, ``std`` (sample
        standard deviation), ``low`` and ``high`` (95 % confidence interval of the mean), ``p`` (p-value against the
        reference) and ``reference``. Values have the units of ``results.json``: bytes, seconds, or shares from 0 to 1.
        Missing values are NaN.
        """
        lines = []
        for row, row_statistics in self.statistics.items():
            searched = [self.searched[row].get(option, nan) for option in self.options]
            for name, number in row_statistics.items():
                spread = nan if number.std is None else number.std
                ends, p_value = number.interval or (nan, nan), self.p_values[name].get(row, nan)
                lines.append([row, *searched, name, number.n, number.mean, spread, *ends, p_value, self.reference])
        columns = ["row", *self.options, "metric", "n", "mean", "std", "low", "high", "p", "reference"]
        return make_frame(lines, columns)

    def render(self, table_format: TableFormat) -> str:
        """Return the table as text.

        CSV has a line for each row and metric, as `to_frame` returns them. Markdown and LaTeX have a line for each row,
        and a note on the meaning of the cells.
        """
        if table_format == "csv":
            text: str = self.to_frame().to_csv(index=False)
            return text
        if table_format == "markdown":
            head, *lines = self._lines
            return f"{markdown_table(head, lines)}\n\n{self.note}\n"
        return f"{LATEX.comment(LATEX.text(self.note))}\n{self.grid(LATEX)}\n"

    def grid(self, markup: Markup) -> str:
        """Return the head of the table and a line for each row, without the note."""
        head, *lines = ([markup.text(cell) for cell in line] for line in self._lines)
        return markup.grid(head, lines)

    @property
    def _lines(self) -> list[list[str]]:
        """The head of the table, and a line for each row, as plain text."""
        heads = ["", *(option.rpartition(".")[2] for option in self.options), "seeds", *map(metric_title, self.metrics)]
        lines = [heads]
        for row in self.values:
            searched = (str(self.searched[row].get(option, "-")) for option in self.options)
            seeds = len({seed for of in self.values[row].values() for seed in of})
            lines.append([row, *searched, str(seeds), *(self._cell(row, name) for name in self.metrics)])
        return lines

    @property
    def note(self) -> str:
        """A sentence on the meaning of the cells."""
        largest = max((number.n for of in self.statistics.values() for number in of.values()), default=0)
        if largest < 2:
            return "Values of one seed."
        note = "Mean ± sample standard deviation over the seeds."
        if largest >= MIN_SEEDS:
            note += " Brackets: 95 % confidence interval of the mean (Student's t)."
        if any(self.p_values.values()):
            note += f" *: p at most {SIGNIFICANCE} in a paired t-test against {self.reference}, with Holm's correction."
        return note

    def _cell(self, row: str, name: str) -> str:
        number = self.statistics[row].get(name)
        if number is None:
            return "-"
        text = metric_number(name, number.mean)
        if number.std is not None and (number.std or not is_size(name)):
            text += f" ± {metric_number(name, number.std)}"
        if number.interval and number.std:
            text += f" [{', '.join(metric_number(name, end) for end in number.interval)}]"
        return text + "*" * (self.p_values[name].get(row, 1.0) <= SIGNIFICANCE)


def headline_metrics(groups: RunsByName) -> list[str]:
    """Return the names of the main metrics that at least one run has, as reports show them.

    Args:
        groups: Contents of ``results.json`` of each seed, for each row.
    """
    runs = [run for of in groups.values() for run in of]
    names = {name for run in runs for name in run["metrics"]}
    selected: list[str] = []
    for quantity in get_quantities(runs[0]["record"]):
        for metric, models in HEADLINES:
            if quantity_metric := metric.for_quantity(quantity):
                candidates = (f"{quantity_metric.name}/{model}" for model in models)
                selected += [key for key in candidates if key in names][:1]
    selected += [key for metric in (UPLOAD_BYTES, DOWNLOAD_BYTES) if (key := f"{metric.name}/total") in names]
    return selected
