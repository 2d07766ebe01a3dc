"""Samples in files that people have: CSV."""

from __future__ import annotations

import csv
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fcl.zoo.entry import Entry


def read_samples(path: Path, entry: Entry) -> NDArray[Any]:
    """The raw samples of a CSV file, for an entry.

    Of a series, a line is a time step and a column a channel: as many lines as a sample has steps are one, and lines
    that are left over are refused. Else a line is a sample, with all of its numbers in their order. A first line
    without numbers is a heading.

    Returns:
        Shape (n, ...), as `Pretrained.predict` takes it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"Expected a CSV file at {path} but found none.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
        heading = bool(lines) and not any(_is_number(field) for field in lines[0])
        table = np.array([[float(field) for field in line] for line in lines[heading:]])
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"Expected {path} to hold numbers, as many in each line, but got: {str(error)[:200]}. Mend that line."
        ) from error
    measurement, shape = entry.measurement, tuple(entry.shape)
    if measurement is not None and "time" in measurement.axes and table.ndim == 2:
        steps = shape[measurement.axes.index("time")]
        channels = len(measurement.channels)
        if table.shape[1] == channels:
            if len(table) % steps:
                raise ValueError(
                    f"Expected {path} to have {steps} lines for each sample but got {len(table)}, which leaves "
                    f"{len(table) % steps} over. Cut them."
                )
            series = table.reshape(-1, steps, channels)
            return series if measurement.axes.index("time") == 0 else series.transpose(0, 2, 1)
    if table.ndim != 2 or table.shape[1] != prod(shape):
        columns = table.shape[1] if table.ndim == 2 else 0
        timed = measurement is not None and "time" in measurement.axes
        names = ", ".join(measurement.channels) if measurement is not None and timed else ""
        or_so = f"{names.count(',') + 1} columns ({names}), a line each time step, or " if names else ""
        raise ValueError(
            f"Expected {path} to have {or_so}{prod(shape)} columns, a line each sample, but got {columns}."
        )
    return table.reshape(-1, *shape)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
