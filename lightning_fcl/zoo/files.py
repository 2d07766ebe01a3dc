"""Samples in files that people have: CSV."""

from __future__ import annotations

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
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        heading = bool(lines) and not any(map(_is_number, lines[0].split(",")))
        table = np.empty((0, 0))
        if numbers := lines[heading:]:
            table = np.loadtxt(numbers, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(
            f"Expected {path} to hold numbers, as many in each line, but got: {str(error)[:200]}. Mend that line."
        ) from error
    shape, axes, channels = tuple(entry.shape), tuple[str, ...](), tuple[str, ...]()
    if entry.measurement is not None and "time" in entry.measurement.axes:
        axes, channels = entry.measurement.axes, entry.measurement.channels
    if axes and table.shape[1] == len(channels):
        steps = shape[axes.index("time")]
        if len(table) % steps:
            raise ValueError(
                f"Expected {path} to have {steps} lines for each sample but got {len(table)}, which leaves "
                f"{len(table) % steps} over. Cut them."
            )
        series = table.reshape(-1, steps, len(channels))
        return series if axes.index("time") == 0 else series.transpose(0, 2, 1)
    if table.shape[1] != prod(shape):
        or_so = f"{len(channels)} columns ({', '.join(channels)}), a line each time step, or " if channels else ""
        raise ValueError(
            f"Expected {path} to have {or_so}{prod(shape)} columns, a line each sample, but got {table.shape[1]}."
        )
    return table.reshape(-1, *shape)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
