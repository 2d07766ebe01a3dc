"""Columns of pandas DataFrames as arrays, with errors that name the column."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.data.tables import DECIMAL_COMMA
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.validation import did_you_mean, format_code_names, format_names, require_package

if TYPE_CHECKING:
    import pandas as pd


def is_frame(value: object) -> TypeGuard[pd.DataFrame]:
    """Return whether a value is a pandas DataFrame. pandas is not imported."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def frame_values(frame: pd.DataFrame) -> NDArray[np.number]:
    """Return the numbers of a DataFrame without missing values, shape (rows, columns).

    Raises:
        TypeError: If a column contains values that are not numbers.
        ValueError: If a value is missing or infinite.
    """
    pandas = require_package("pandas", "reads DataFrames")
    is_numeric = pandas.api.types.is_numeric_dtype
    wrong = [name for name, dtype in frame.dtypes.items() if not is_numeric(dtype) or dtype.kind == "c"]
    if wrong:
        shown_types = format_names(dict.fromkeys(str(frame.dtypes[name]) for name in wrong))
        raise InvalidTypeError(
            f"Expected numbers in each column of `x`, but got values of type {shown_types} in "
            f"{format_code_names(wrong)}.",
            hint="Encode text and categories, for example with `pandas.get_dummies(x, dtype=float)`, or use "
            "`lightning_fcl.data.preprocessing.TablePreprocessor`.",
            argument="x",
            value=wrong,
        )
    values: NDArray[np.number] = np.asarray(frame)
    if values.dtype.kind == "O":
        # Columns with missing values (pd.NA), or columns of numbers and of booleans.
        values = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    if values.dtype.kind == "f" and not (is_finite := np.isfinite(values)).all():
        bad_columns = [str(name) for name, fine in zip(frame.columns, is_finite.all(axis=0), strict=True) if not fine]
        num_rows = int((~is_finite.all(axis=1)).sum())
        raise InvalidValueError(
            f"Expected finite numbers in each column of `x`, but got missing or infinite values in "
            f"{format_code_names(bad_columns)} ({num_rows} of {len(frame)} rows have such values).",
            hint="Fill in missing values, for example with `lightning_fcl.data.preprocessing.TablePreprocessor`, or "
            "remove the rows with `x.dropna()` and their targets.",
            argument="x",
            value=bad_columns,
        )
    return values


def column_of(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return the column with a name.

    Raises:
        ValueError: If the column is missing, or if several columns have this name.
    """
    num_matches = int((frame.columns == name).sum())
    if num_matches == 0:
        names = [str(column) for column in frame.columns]
        raise UnknownNameError(
            f"Expected a column `{name}` in the table, but got the columns "
            f"{format_names(names) or 'of an empty table'}.",
            hint=f"{did_you_mean(name, names)} If the table has no such values, add the column with missing values: "
            f"`frame['{name}'] = float('nan')`.",
            argument="frame",
            value=name,
        )
    if num_matches > 1:
        raise InvalidValueError(
            f"Expected one column `{name}` in the table, but got {num_matches}.",
            hint="Rename or remove the duplicates.",
            argument="frame",
            value=name,
        )
    return frame[name]


def numeric_column(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """Return the numbers of a column, shape (rows,). Missing values are NaN. See `column_of`.

    Raises:
        TypeError: If the column contains a value that is not a number.
        ValueError: If the column is missing or not unique, or if it contains an infinite number.
    """
    pandas = require_package("pandas", "reads DataFrames")
    column = column_of(frame, name)
    if pandas.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind != "c":
        values: NDArray[np.float64] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        is_missing = column.isna().to_numpy()
        cells = column.to_numpy(dtype=object)
        wrong = [
            row for row in np.flatnonzero(~is_missing) if not isinstance(cells[row], bool | int | float | np.number)
        ]
        if wrong:
            # Name a cell that is no number at all, if there is one.
            row = next((row for row in wrong if not _is_number(cells[row])), wrong[0])
            hint = (
                f"Convert the column with `pandas.to_numeric(frame['{name}'], errors='coerce')`, which replaces other "
                f"text by missing values, or pass `{name}` in `categorical`."
            )
            if isinstance(cells[row], str) and DECIMAL_COMMA.fullmatch(cells[row].strip()):
                hint = "Read the file with `pandas.read_csv(path, decimal=',')`."
            raise InvalidTypeError(
                f"Expected numbers in column `{name}` of the table, but got {cells[row]!r} in the row with index "
                f"{column.index[row]}.",
                hint=hint,
                argument="frame",
                value=cells[row],
            )
        values = np.full(len(cells), np.nan)
        values[~is_missing] = cells[~is_missing].astype(np.float64)
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise InvalidValueError(
            f"Expected finite numbers in column `{name}` of the table, but got {values[infinite[0]]} in the row with "
            f"index {column.index[infinite[0]]}.",
            hint="Replace infinite numbers, for example with `frame.replace([numpy.inf, -numpy.inf], numpy.nan)`.",
            argument="frame",
            value=values[infinite[0]],
        )
    return values


def _is_number(cell: object) -> bool:
    """Return whether a cell contains a number as text."""
    try:
        return isinstance(cell, str) and math.isfinite(float(cell))
    except ValueError:
        return False


def categorical_column(frame: pd.DataFrame, name: str) -> Sequence[str | None]:
    """Return the categories in a column as text. Missing values are None. See `column_of`.

    Whole numbers have the same text with and without a decimal point, because pandas reads a column of integers with a
    missing value as floating-point numbers.

    Raises:
        TypeError: If a value is neither text, nor a boolean, nor a whole number.
        ValueError: If the column is missing or not unique.
    """
    column = column_of(frame, name)
    categories: list[str | None] = []
    for index, is_missing_cell, cell in zip(column.index, column.isna(), column.to_numpy(dtype=object), strict=True):
        if is_missing_cell:
            categories.append(None)
        elif isinstance(cell, str | bool | np.bool_ | int | np.integer):
            categories.append(str(cell))
        elif isinstance(cell, float | np.floating) and float(cell).is_integer():
            categories.append(str(int(cell)))
        else:
            raise InvalidTypeError(
                f"Expected text, booleans or whole numbers in column `{name}` of the table, but got {cell!r} in the "
                f"row with index {index}.",
                hint=f"Convert the column with `frame['{name}'].astype(str)`, or pass `{name}` in `numeric`.",
                argument="frame",
                value=cell,
            )
    return categories
