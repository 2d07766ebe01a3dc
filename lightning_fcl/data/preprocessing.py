"""Preprocessing of tables from statistics of the clients: imputation, standardization and one-hot encoding.

Each client computes a `TableStatistics` of its rows. `TablePreprocessor.from_statistics` combines the statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.frames import categorical_column, is_frame, numeric_column
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.validation import (
    check_arguments,
    did_you_mean,
    format_code_names,
    format_names,
    require_package,
    validate_fields,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of the columns in a client's table: the numbers that the client shares in place of its rows.

    The fields are plain data, so ``dataclasses.asdict`` and JSON can store them. A column with only one or two values
    reveals these values. `from_frame` computes the statistics.

    Args:
        num_rows: Number of rows.
        counts: Number of values in each numeric column, without missing values.
        means: Mean of the values in each numeric column. 0 for a column without values.
        squares: Sum of the squared deviations from the mean in each numeric column.
        categories: Number of rows of each category, for each categorical column.

    Raises:
        ValueError: If a number is negative or non-finite, or if a column has more values than rows.
    """

    num_rows: int
    counts: dict[str, int]
    means: dict[str, float]
    squares: dict[str, float]
    categories: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_fields(self)
        numeric_columns = [*self.counts, *(name for name in (*self.means, *self.squares) if name not in self.counts)]
        is_valid = {
            name: name in self.counts
            and 0 <= self.counts[name] <= self.num_rows
            and math.isfinite(self.means.get(name, math.nan))
            and 0 <= self.squares.get(name, math.nan) < math.inf
            for name in numeric_columns
        } | {
            name: min(counts.values(), default=0) >= 0 and sum(counts.values()) <= self.num_rows
            for name, counts in self.categories.items()
        }
        if wrong := [name for name, fine in is_valid.items() if not fine]:
            raise InvalidValueError(
                "Expected each column of the statistics to have finite numbers and at most as many values as rows "
                f"({self.num_rows}), but got other numbers for {format_code_names(wrong)}.",
                hint="Compute the statistics with `TableStatistics.from_frame`. If the numbers of the column are very "
                "large, divide the column first.",
                argument="squares",
                value=wrong,
            )

    @classmethod
    def from_frame(
        cls, frame: pd.DataFrame, numeric: Sequence[str], categorical: Sequence[str] = ()
    ) -> TableStatistics:
        """Return the statistics of a table. Columns are found by name. Other columns are ignored.

        Args:
            frame: Table of one client. NaN, None and ``pandas.NA`` are missing values.
            numeric: Names of the columns that contain numbers or booleans.
            categorical: Names of the columns that contain categories: text, booleans or whole numbers.

        Raises:
            TypeError: If ``frame`` is not a DataFrame, or if a value has the wrong type.
            ValueError: If a column is missing, not unique or passed twice, or if a number is infinite.

        Example:
            >>> import pandas as pd
            >>> ward = pd.DataFrame({"age": [30.0, 50.0, None], "unit": ["A", "B", "A"]})
            >>> TableStatistics.from_frame(ward, numeric=["age"], categorical=["unit"]).categories
            {'unit': {'A': 2, 'B': 1}}
        """
        _check_frame(frame)
        _check_columns(numeric, categorical)
        statistics = {name: _summarize(numeric_column(frame, name)) for name in numeric}
        return cls(
            num_rows=len(frame),
            counts={name: count for name, (count, _, _) in statistics.items()},
            means={name: mean for name, (_, mean, _) in statistics.items()},
            squares={name: squares for name, (_, _, squares) in statistics.items()},
            categories={name: _count_categories(categorical_column(frame, name)) for name in categorical},
        )

    @property
    def missing(self) -> dict[str, int]:
        """Number of missing values in each column."""
        numeric = {name: self.num_rows - count for name, count in self.counts.items()}
        return numeric | {name: self.num_rows - sum(counts.values()) for name, counts in self.categories.items()}


@dataclass(frozen=True)
class TablePreprocessor:
    """Preprocessing of a table: imputation, standardization and one-hot encoding, with indicators of missing values.

    `transform` returns these columns, in this order:

    - Each numeric column: ``(value - mean) / std``. A missing value becomes 0, which is the mean.
    - For each categorical column, one column per category, such as ``unit=A``, with 1 or 0. If the value is missing,
      all of them are 0.
    - For each column in ``indicators``, a column such as ``age is missing``, with 1 or 0.

    The fields are plain data. ``TablePreprocessor(**dataclasses.asdict(preprocessor))`` returns an equal preprocessor.
    A module that has the fields as an argument therefore stores them in its checkpoint.

    Args:
        means: Mean of each numeric column.
        stds: Standard deviation of each numeric column, above 0.
        categories: Categories of each categorical column.
        indicators: Names of the columns that get an indicator of missing values.

    Raises:
        ValueError: If the columns of ``means`` and ``stds`` differ, if a number is invalid, or if ``indicators``
            contains an unknown column.

    Example:
        >>> import pandas as pd
        >>> sites = {"a": pd.DataFrame({"age": [30.0, 50.0]}), "b": pd.DataFrame({"age": [None, 70.0]})}
        >>> shared = {site: TableStatistics.from_frame(frame, numeric=["age"]) for site, frame in sites.items()}
        >>> preprocessor = TablePreprocessor.from_statistics(shared)
        >>> preprocessor.means, preprocessor.transform(sites["b"]).to_numpy().round(2).tolist()
        ({'age': 50.0}, [[0.0, 1.0], [1.2200000286102295, 0.0]])
    """

    means: dict[str, float]
    stds: dict[str, float]
    categories: dict[str, list[str]] = field(default_factory=dict)
    indicators: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        validate_fields(self)
        _check_columns([*self.means], [*self.categories])
        wrong = [
            name
            for name in {**self.means, **self.stds}
            if not (math.isfinite(self.means.get(name, math.nan)) and 0 < self.stds.get(name, math.nan) < math.inf)
        ]
        if wrong:
            raise InvalidValueError(
                "Expected a finite mean and a finite standard deviation above 0 for each numeric column, but got other "
                f"values for {format_code_names(wrong)}.",
                hint="Create the preprocessor with `TablePreprocessor.from_statistics`.",
                argument="stds",
                value=wrong,
            )
        if unknown := [name for name in self.indicators if name not in {**self.means, **self.categories}]:
            raise UnknownNameError(
                f"Expected `indicators` to contain columns of the preprocessor, but got {format_code_names(unknown)}.",
                hint=did_you_mean(unknown[0], {**self.means, **self.categories})
                or "Create the preprocessor with `TablePreprocessor.from_statistics`.",
                argument="indicators",
                value=unknown,
            )

    @classmethod
    @check_arguments
    def from_statistics(cls, statistics: Mapping[str, TableStatistics]) -> TablePreprocessor:
        """Return the preprocessor of all clients together.

        Means and standard deviations are those of all values of all clients (population standard deviation, as in
        scikit-learn's ``StandardScaler``). A constant column has the standard deviation 1. The categories of a column
        are those of all clients, in ascending order. A column with a missing value at any client gets an indicator.

        Args:
            statistics: Statistics of each client, by the name of the client.

        Raises:
            ValueError: If there are no statistics, if clients have different columns, or if all clients together have
                no value in a column.
        """
        if not statistics:
            raise MissingValueError(
                "Expected `statistics` to contain the statistics of at least one client, but got none.",
                hint="Pass a dict with a `TableStatistics` for each client.",
                argument="statistics",
            )
        for kind, attribute in (("numeric", "counts"), ("categorical", "categories")):
            columns = {client: getattr(own, attribute).keys() for client, own in statistics.items()}
            every_column = dict.fromkeys(name for names in columns.values() for name in names)
            lacking = [
                (client, name) for name in every_column for client, names in columns.items() if name not in names
            ]
            if lacking:
                raise InvalidValueError(
                    f"Expected the same {kind} columns for all clients, but client {lacking[0][0]} has no {kind} "
                    f"column `{lacking[0][1]}`.",
                    hint="Pass the same `numeric` and `categorical` to `TableStatistics.from_frame` for all clients.",
                    argument="statistics",
                    value=lacking[0][1],
                )
        first = next(iter(statistics.values()))
        all_statistics = list(statistics.values())
        all_summaries = {
            name: _merge((own.counts[name], own.means[name], own.squares[name]) for own in all_statistics)
            for name in first.counts
        }
        categories = {
            name: sorted({category for own in all_statistics for category in own.categories[name]})
            for name in first.categories
        }
        num_values = {name: count for name, (count, _, _) in all_summaries.items()}
        num_values |= {name: len(names) for name, names in categories.items()}
        if empty := [name for name, count in num_values.items() if not count]:
            raise MissingValueError(
                f"Expected each column to have a value at one client at least, but {format_code_names(empty)} has "
                "none.",
                hint=f"Remove {format_code_names(empty)} from `numeric` and `categorical`.",
                argument="statistics",
                value=empty,
            )
        return cls(
            means={name: mean for name, (_, mean, _) in all_summaries.items()},
            stds={name: _std(*statistics) for name, statistics in all_summaries.items()},
            categories=categories,
            indicators=[name for name in num_values if any(own.missing[name] for own in all_statistics)],
        )

    @property
    def features(self) -> list[str]:
        """Names of the columns that `transform` returns."""
        encoded = [f"{name}={category}" for name, categories in self.categories.items() for category in categories]
        return [*self.means, *encoded, *(f"{name} is missing" for name in self.indicators)]

    def transform(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the preprocessed table, as float32 without missing values. The index stays the same.

        Args:
            frame: Table with the columns of the preprocessor, in any order. Other columns are ignored.

        Raises:
            TypeError: If ``frame`` is not a DataFrame, or if a value has the wrong type.
            ValueError: If a column is missing or not unique, if a number is infinite, or if a category is unknown.
        """
        pandas = require_package("pandas", "reads DataFrames")
        _check_frame(frame)
        is_missing: dict[str, NDArray[np.bool_]] = {}
        columns: list[NDArray[np.float64]] = []
        for name, mean in self.means.items():
            values = numeric_column(frame, name)
            is_missing[name] = np.isnan(values)
            columns.append(np.where(is_missing[name], 0, (values - mean) / self.stds[name]))
        for name, categories in self.categories.items():
            cells = categorical_column(frame, name)
            if unknown := sorted({category for category in cells if category is not None} - {*categories}):
                raise UnknownNameError(
                    f"Expected the categories {format_names(categories)} in column `{name}`, but got "
                    f"{format_names(unknown)}.",
                    hint="Compute the statistics from tables with all categories, or replace unknown categories by "
                    "None.",
                    argument="frame",
                    value=unknown,
                )
            is_missing[name] = np.array([category is None for category in cells], dtype=bool)
            columns += [np.array([cell == category for cell in cells], dtype=np.float64) for category in categories]
        columns += [is_missing[name].astype(np.float64) for name in self.indicators]
        content = np.stack(columns, axis=1).astype(np.float32)
        result: pd.DataFrame = pandas.DataFrame(content, index=frame.index, columns=self.features)
        return result


def _check_frame(frame: object) -> None:
    if not is_frame(frame):
        raise InvalidTypeError(
            f"Expected `frame` to be a pandas DataFrame, but got {type(frame).__name__}.",
            hint="Read the file of a client with `pandas.read_csv`.",
            argument="frame",
            value=type(frame).__name__,
        )


def _check_columns(numeric: Sequence[str], categorical: Sequence[str]) -> None:
    """Raise ValueError if there is no column, or if a column is passed twice."""
    names = [*numeric, *categorical]
    if isinstance(numeric, str) or isinstance(categorical, str) or not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(
            f"Expected `numeric` and `categorical` to be lists of texts, but got {numeric!r} and {categorical!r}.",
            hint='Pass lists of column names, such as `numeric=["age"]`. Rename other columns with '
            "`frame.rename(columns=str)`.",
            argument="numeric",
            value=numeric,
        )
    repeated = [name for name, number in Counter(names).items() if number > 1]
    if not names or repeated:
        raise InvalidValueError(
            "Expected `numeric` and `categorical` to contain at least one column, and each column once, but got "
            f"{format_code_names(repeated) + ' more than once' if repeated else 'no column'}.",
            hint="Pass the name of each column once.",
            argument="numeric",
            value=names,
        )


def _summarize(values: NDArray[np.float64]) -> tuple[int, float, float]:
    """Return the number of values that are not NaN, their mean, and the sum of their squared deviations."""
    present = values[~np.isnan(values)]
    if not len(present):
        return 0, 0.0, 0.0
    # `TableStatistics` rejects infinite sums.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = present.mean()
        return len(present), float(mean), float(np.square(present - mean).sum())


def _count_categories(categories: Sequence[str | None]) -> dict[str, int]:
    counts = Counter(category for category in categories if category is not None)
    return {category: counts[category] for category in sorted(counts)}


def _merge(statistics: Iterable[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Return the count, the mean and the sum of squared deviations of all values together (Chan et al., 1983).

    Sums of squared values would lose digits if the mean is large compared with the deviations.
    """
    all_statistics = list(statistics)
    count = sum(own for own, _, _ in all_statistics)
    if not count:
        return 0, 0.0, 0.0
    mean = math.fsum(own * own_mean for own, own_mean, _ in all_statistics) / count
    return count, mean, math.fsum(squares + own * (own_mean - mean) ** 2 for own, own_mean, squares in all_statistics)


def _std(count: int, mean: float, squares: float) -> float:
    """Return the standard deviation, or 1 if the deviations are not larger than rounding errors of the mean."""
    variance, epsilon = squares / count, float(np.finfo(np.float64).eps)
    # Four times the bound of scikit-learn's StandardScaler, because the means of the clients are rounded, too.
    return 1.0 if variance <= 4 * (count * epsilon * variance + (count * mean * epsilon) ** 2) else math.sqrt(variance)
