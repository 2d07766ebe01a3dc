"""``metrics.csv``: what was measured, round by round."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.clock import simulated_times
from lightning_fcl.evaluation.continual import part_name
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.metrics import models_tested


def write_csv(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a line for each model and round: its accuracy, that of each group, and its bytes on the wire.

    Or, in place of accuracy, each measure of the record. What was not tested is left empty. By the clock of a rehearsed
    deployment, the last column tells the seconds from its beginning to the end of the round.
    """
    names = [one["name"] for one in record.get("measures", [])]
    heads = [[name, *(f"{name} {group}" for group in record["groups"])] for name in names]
    text = io.StringIO()
    writer = csv.writer(text)
    columns = list(itertools.chain(*heads)) or ["accuracy", *record["groups"]]
    times = simulated_times(record).tolist()
    ends = [[time] for time in times] or [[] for _ in record["rounds"]]
    writer.writerow(
        ["round", "model", *columns, "upload_bytes", "download_bytes", *(["simulated_time"] if times else [])]
    )
    for entry, end in zip(record["rounds"], ends, strict=True):
        ways, found = [entry[key] for key in ("upload_bytes", "download_bytes")], models_tested(entry)
        for model in dict.fromkeys([*found, *ways[0], *ways[1]]):
            cells = [""] * len(columns)
            if model in found:
                cells = _measured_cells(found[model], names, record) if names else _counted_cells(found[model], record)
            writer.writerow([entry["round"], model, *cells, *(way.get(model, "") for way in ways), *end])
    return write_whole(path, text.getvalue())


def _counted_cells(correct: Sequence[int | None], record: Mapping[str, Any]) -> list[Any]:
    totals = record["totals"]
    groups = ["" if c is None or not n else c / n for c, n in zip(correct, totals, strict=True)]
    return ["" if None in correct else sum(c or 0 for c in correct) / sum(totals), *groups]


def _measured_cells(
    values: Mapping[str, Mapping[str, float | None]], names: Sequence[str], record: Mapping[str, Any]
) -> list[Any]:
    numbers = range(len(record["groups"]))
    parts = [part_name(numbers), *(part_name([number]) for number in numbers)]
    cells = [values[name].get(part) for name in names for part in parts]
    return ["" if cell is None else cell for cell in cells]
