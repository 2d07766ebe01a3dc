"""``metrics.csv``: what was measured, round by round."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.continual import part_name
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.metrics import models_tested


def write_csv(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a line for each model and round: its accuracy, that of each group, and its bytes on the wire.

    Or, in place of accuracy, each measure of the record. What was not tested is left empty.
    """
    names = [one["name"] for one in record.get("measures", [])]
    heads = [[name, *(f"{name} {group}" for group in record["groups"])] for name in names]
    text = io.StringIO()
    writer = csv.writer(text)
    columns = list(itertools.chain(*heads)) or ["accuracy", *record["groups"]]
    writer.writerow(["round", "model", *columns, "upload_bytes", "download_bytes"])
    for entry in record["rounds"]:
        ways, found = [entry[key] for key in ("upload_bytes", "download_bytes")], models_tested(entry)
        for model in dict.fromkeys([*found, *ways[0], *ways[1]]):
            cells = [""] * len(columns)
            if model in found:
                cells = _measured_cells(found[model], names, record) if names else _counted_cells(found[model], record)
            writer.writerow([entry["round"], model, *cells, *(way.get(model, "") for way in ways)])
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
