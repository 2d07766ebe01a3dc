"""``metrics.csv``: what was measured, round by round."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.clock import simulated_times
from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.evaluation.metrics import curves, models_tested

_WAYS = ("upload_bytes", "download_bytes")


def write_csv(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a line for each model and round: its accuracy, that of each group, and its bytes on the wire.

    Or, in place of accuracy, each measure of the record. What was not tested is left empty. By the clock of a rehearsed
    deployment, the last column tells the seconds from its beginning to the end of the round.
    """
    names = [one["name"] for one in record.get("measures", [])]
    heads = [[name, *(f"{name} {group}" for group in record["groups"])] for name in names]
    columns = list(itertools.chain(*heads)) or ["accuracy", *record["groups"]]
    tested: dict[tuple[int, str], list[float]] = {}
    for name in names or [None]:
        for model, curve in curves(record, name).items():
            for number, whole, groups in zip(curve.rounds, curve.overall, curve.accuracy.tolist(), strict=True):
                tested.setdefault((int(number), model), []).extend([float(whole), *groups])
    times = simulated_times(record).tolist()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["round", "model", *columns, *_WAYS, *(["simulated_time"] if times else [])])
    for number, entry in enumerate(record["rounds"]):
        for model in dict.fromkeys([*models_tested(entry), *entry[_WAYS[0]], *entry[_WAYS[1]]]):
            cells = tested.get((entry["round"], model), [nan] * len(columns))
            plain = ["" if isnan(cell) else cell for cell in cells]
            traffic = [entry[way].get(model, "") for way in _WAYS]
            writer.writerow([entry["round"], model, *plain, *traffic, *times[number : number + 1]])
    return write_whole(path, text.getvalue())
