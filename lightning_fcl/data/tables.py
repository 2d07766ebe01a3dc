"""Datasets from tables, which are CSV and parquet files with named columns."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fcl.errors import InvalidTypeError, InvalidValueError, MissingValueError, UnknownNameError
from lightning_fcl.io.reading import as_file_error, check_size, open_file, regular_file
from lightning_fcl.validation import check_arguments, did_you_mean, format_code_names, format_names, require_package

SUFFIXES = (".csv", ".parquet")
"""File extensions that `Table` reads."""

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}

_Where = Callable[[int], str]
"""Function that returns the description of a row for messages. Its argument is the index of the row, from 0."""


class Table(Dataset[tuple[Tensor, Any]]):
    """A dataset that reads a CSV or parquet file with named columns.

    Every row is a sample. A target column of text or integers contains labels. A target column of decimal numbers
    contains numeric targets. The file is read when the samples are first accessed.

    Args:
        path: Path of the file. A CSV file is UTF-8 text with a header, commas between columns and decimal points.
        target: Name of the target column, or the names of several numeric columns.
        features: Names of the feature columns, in the order that the module expects.
        mean: Number that is subtracted from each feature: one number, or one number per feature. Default: 0.
        std: Number by which each feature is divided afterwards: one number, or one number per feature. Default: 1.

    Raises:
        ValueError: If an argument is invalid. Also when the file is read, if a column is missing or not unique, or if a
            cell contains an invalid value.
        TypeError: When the file is read, if a parquet column contains neither numbers nor text.

    Example:
        >>> import os
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "site.csv"
        ...     _ = path.write_text(os.linesep.join(["speed,label,load", "1.5,walk,2", "0.5,sit,4"]))
        ...     table = Table(path, target="label", features=["load", "speed"])
        ...     table.x.tolist(), table.targets.tolist()
        ([[2.0, 1.5], [4.0, 0.5]], ['walk', 'sit'])
    """

    @check_arguments
    def __init__(
        self,
        path: str | Path,
        target: str | Sequence[str],
        features: Sequence[str],
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> None:
        self.path = Path(path)
        self.target = (target,) if isinstance(target, str) else tuple(target)
        self.features = tuple(features) if not isinstance(features, str) else (features,)
        if self.path.suffix not in SUFFIXES:
            raise InvalidValueError(
                f"Expected `path` to end in {' or '.join(SUFFIXES)}, but got {path}.",
                hint="Save the table as a CSV file.",
                argument="path",
                value=str(path),
            )
        for name, column_names in (("target", self.target), ("features", self.features)):
            if not column_names or "" in column_names or len({*column_names}) < len(column_names):
                raise InvalidValueError(
                    f"Expected `{name}` to contain one or more different, non-empty column names, but got "
                    f"{list(column_names)}.",
                    hint="Pass the name of each column once.",
                    argument=name,
                    value=column_names,
                )
        if shared_names := [name for name in self.features if name in self.target]:
            raise InvalidValueError(
                f"Expected `features` not to contain target columns, but got {format_code_names(shared_names)}.",
                hint=f"Remove {format_code_names(shared_names)} from `features`.",
                argument="features",
                value=shared_names,
            )
        self.mean, self.std = self._scale("mean", mean, 0.0), self._scale("std", std, 1.0)

    def _scale(self, name: str, value: float | Sequence[float] | None, default: float) -> NDArray[np.float64]:
        values = np.asarray(default if value is None else value, dtype=np.float64)
        if (
            values.shape not in ((), (len(self.features),))
            or not np.isfinite(values).all()
            or (name == "std" and not (values > 0).all())
        ):
            bound = " above 0" if name == "std" else ""
            raise InvalidValueError(
                f"Expected `{name}` to be a finite number{bound}, or a list with one such number per feature "
                f"(features: {len(self.features)}), but got {value}.",
                hint=f"Pass `{name}={[default] * len(self.features)}` to leave the features unchanged.",
                argument=name,
                value=value,
            )
        return values

    @property
    def x(self) -> Tensor:
        """Normalized features, shape (n, features), as float32."""
        return self._content[0]

    @property
    def targets(self) -> NDArray[Any]:
        """Target of each sample, shape (n,) or (n, targets): text, integers or float32 numbers."""
        return self._content[1]

    @cached_property
    def _content(self) -> tuple[Tensor, NDArray[Any]]:
        read_table = _read_csv if self.path.suffix == ".csv" else _read_parquet
        values, targets = read_table(self.path, self.features, self.target)
        return torch.from_numpy(((values - self.mean) / self.std).astype(np.float32)), targets

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        target = self.targets[index]
        return self.x[index], torch.tensor(target) if self.targets.dtype.kind == "f" else target


def _read_csv(path: Path, features: Sequence[str], target: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the features of a CSV file, shape (n, features), and its targets, in this order."""
    rows = _csv_rows(path)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    positions = _places(path, header, [*features, *target])
    values, lines = array("d"), array("q")
    cells: list[list[str]] = [[] for _ in target]

    def describe_row(row: int) -> str:
        return f"row {row + 2} (line {lines[row]})"

    for number, (line, row) in enumerate(rows):
        lines.append(line)
        if len(row) != len(header):
            raise InvalidValueError(
                f"Expected the number of cells in each row of {path} to be {len(header)}, as in the header, but got "
                f"{len(row)} in {describe_row(number)}.",
                hint="Write decimal numbers with a point, and put text that has commas in quotation marks."
                if len(row) > len(header)
                else "Add the missing cells to the row.",
                argument="data",
            )
        for name, position in zip(features, positions, strict=False):
            values.append(_number(row[position], path, name, number, describe_row))
        for column, position in zip(cells, positions[len(features) :], strict=True):
            column.append(row[position].strip())
    _check_rows(path, len(lines))
    whole = np.frombuffer(values, dtype=np.float64).reshape(len(lines), len(features))
    if len(target) == 1:
        return whole, _joined([_targets(target[0], cells[0], path, describe_row)])
    named_columns = zip(target, cells, strict=True)
    return whole, _joined([_numbers(name, column, path, describe_row) for name, column in named_columns])


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) for each non-empty row of a CSV file. ``line`` is the number of the row's last line."""
    hint = "Save the file as CSV in UTF-8, and pass its path."
    with (
        as_file_error(path, "to be a CSV file in UTF-8", hint),
        TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file,
    ):
        size = path.stat().st_size
        check_size(8 * size, size)
        reader = csv.reader(file, skipinitialspace=True, strict=True)
        yield from ((reader.line_num, row) for row in reader if row)


def _read_parquet(
    path: Path, features: Sequence[str], target: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the features of a parquet file, shape (n, features), and its targets, in this order."""
    arrow, parquet = (require_package(f"pyarrow{name}", "reads parquet files", "tables") for name in ("", ".parquet"))
    description, hint = "to be a parquet file", "Write the file with `pandas.DataFrame.to_parquet`."
    with as_file_error(path, description, hint):
        file = parquet.ParquetFile(regular_file(path))
        groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
        check_size(sum(group.total_byte_size for group in groups), path.stat().st_size)
        header = list(file.schema_arrow.names)
    _places(path, header, [*features, *target])
    with as_file_error(path, description, hint):
        table = file.read(columns=[*features, *target])
    _check_rows(path, len(table))

    def describe_row(row: int) -> str:
        return f"row {row + 2}"

    def column(name: str) -> NDArray[Any]:
        chunked_array = table.column(name)
        if chunked_array.null_count:
            raise _missing(path, name, describe_row(chunked_array.is_null().to_pylist().index(True)))
        kind, kinds = chunked_array.type, arrow.types
        if kinds.is_dictionary(kind):
            kind = kind.value_type
        if kinds.is_string(kind) or kinds.is_large_string(kind):
            return np.array([cell.strip() for cell in chunked_array.to_pylist()], dtype=np.str_)
        if kinds.is_integer(kind) or kinds.is_boolean(kind):
            return np.asarray(chunked_array.cast(arrow.int64(), safe=False).to_numpy())
        if not (kinds.is_floating(kind) or kinds.is_decimal(kind)):
            raise InvalidTypeError(
                f"Expected numbers or text in column `{name}` of {path}, but got {kind}.",
                hint="Convert the column to numbers or text.",
                argument="data",
                value=str(kind),
            )
        values = np.asarray(chunked_array.cast(arrow.float64(), safe=False).to_numpy())
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            # `_number` raises the error for a missing value (NaN) or for an infinite value.
            _number(str(values[wrong[0]]), path, name, int(wrong[0]), describe_row)
        return values

    def numbers(name: str) -> NDArray[np.float64]:
        values = column(name)
        if values.dtype.kind == "U":
            values = _numbers(name, values.tolist(), path, describe_row)
        return values.astype(np.float64)

    def labels(name: str) -> NDArray[Any]:
        values = column(name)
        if values.dtype.kind == "U" and (values == "").any():
            raise _missing(path, name, describe_row(int((values == "").argmax())))
        # In a CSV file, booleans are text. Convert booleans, so that both formats give equal labels.
        return values.astype(bool).astype(np.str_) if arrow.types.is_boolean(table.column(name).type) else values

    return np.stack([numbers(name) for name in features], axis=1), _joined(
        [labels(name) if len(target) == 1 else numbers(name) for name in target]
    )


def _places(path: Path, header: Sequence[str], column_names: Sequence[str]) -> list[int]:
    """Return the index of each requested column in the header. Raise ValueError if a column is missing or repeated."""
    for name in column_names:
        matches = [number for number, one in enumerate(header, start=1) if one == name]
        if not matches:
            separators = [one for one in (";", "\t") if len(header) == 1 and one in header[0]]
            raise UnknownNameError(
                f"Expected a column `{name}` in {path}, but got the columns "
                f"{format_names(header) or 'of an empty file'}.",
                hint="Separate the columns by commas."
                if separators
                else did_you_mean(name, header) or "Use the name of a column in the file.",
                argument="target" if name == column_names[-1] else "features",
                value=name,
            )
        if len(matches) > 1:
            raise InvalidValueError(
                f"Expected one column `{name}` in {path}, but got {len(matches)}: columns {format_names(matches)}.",
                hint="Rename or remove the duplicates.",
                argument="data",
                value=name,
            )
    return [header.index(name) for name in column_names]


def _check_rows(path: Path, rows: int) -> None:
    if not rows:
        raise MissingValueError(
            f"Expected at least one row of values in {path}, but got none.", hint="Add a row.", argument="data"
        )


def _missing(path: Path, name: str, location: str) -> MissingValueError:
    return MissingValueError(
        f"Expected a value in column `{name}` of {path}, but got none in {location}.",
        hint="Fill in the value, or remove the row.",
        argument="data",
    )


def _number(cell: str, path: Path, name: str, row: int, describe_row: _Where) -> float:
    """Return the number in a cell. Raise ValueError if the cell does not contain a finite number."""
    value = _parsed(cell)
    if value is not None:
        return value
    if cell.strip().lower() in _MISSING:
        raise _missing(path, name, describe_row(row))
    hint = "Write a number in this cell, or use another column."
    if DECIMAL_COMMA.fullmatch(cell.strip()):
        hint = f"Write {cell.strip().replace(',', '.')}, with a decimal point."
    raise InvalidValueError(
        f"Expected a finite number in column `{name}` of {path}, but got {cell!r} in {describe_row(row)}.",
        hint=hint,
        argument="data",
    )


def _parsed(cell: str) -> float | None:
    """Return the number in a cell, or None if the cell does not contain a finite number."""
    try:
        value = float(cell)
    except ValueError:
        return None
    # Python accepts underscores between digits. Other programs read such cells as text.
    return value if math.isfinite(value) and "_" not in cell else None


def _targets(name: str, cells: Sequence[str], path: Path, describe_row: _Where) -> NDArray[Any]:
    """Return the targets in one column of a CSV file as integers, floating-point numbers or text."""
    if "" in cells:
        raise _missing(path, name, describe_row(list(cells).index("")))
    if all(map(_INTEGER.fullmatch, cells)):
        return np.array(list(map(int, cells)), dtype=np.int64)
    # If a cell contains a decimal number, the targets are numeric. A cell without a number then raises an error.
    if any(_parsed(cell) is not None and not _INTEGER.fullmatch(cell) for cell in set(cells)):
        return _numbers(name, cells, path, describe_row)
    return np.array(cells, dtype=np.str_)


def _numbers(name: str, cells: Sequence[str], path: Path, describe_row: _Where) -> NDArray[np.float64]:
    return np.array([_number(cell, path, name, row, describe_row) for row, cell in enumerate(cells)])


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the targets in an array: shape (n,) for one column, or (n, columns) for several columns of numbers."""
    targets = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return targets.astype(np.float32) if targets.dtype.kind == "f" else targets
