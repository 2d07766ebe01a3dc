"""Runs task by task: of their first tasks alone, after each task, and how much a method gains over others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.metrics import task_curves
from lightning_fcl.evaluation.table import Cell, Table

__all__ = ["first_tasks", "with_tasks"]


def first_tasks(record: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """The record that a run would have if each client had its first tasks alone; of a whole one, without its end.

    Example:
        >>> rounds = [{"round": r, "experience": {"server": r, "a": r}, "correct": {"a": [9 - r, r]}} for r in range(2)]
        >>> cut = first_tasks({"tasks": {"a": [[0], [1]]}, "rounds": rounds, "kept_bytes": {"a": 40}}, tasks=1)
        >>> cut["tasks"], len(cut["rounds"]), "kept_bytes" in cut
        ({'a': [[0]]}, 1, False)
    """
    rounds = [entry for entry in record["rounds"] if entry["experience"]["server"] < tasks]
    ended = ("kept_bytes", "training") if len(rounds) < len(record["rounds"]) else ()
    kept = {name: value for name, value in record.items() if name not in ended}
    return {**kept, "tasks": {model: own[:tasks] for model, own in record["tasks"].items()}, "rounds": rounds}


def with_tasks(table: Table, results: Mapping[str, Sequence[Mapping[str, Any]]], gains: Mapping[str, Any]) -> Table:
    """A table with the clients' average accuracy after each task, and how much some rows gain over others.

    Args:
        table: The table.
        results: Contents of ``results.json`` of each seed of its rows.
        gains: The rows ``of`` which it is told how far their accuracy lies above the mean of that of the rows ``over``,
            by that mean, and the ``paper``'s numbers after each task. Only where all those rows were run.

    Returns:
        It, with the metrics ``accuracy_after_1/clients`` and ``gain_after_1/clients`` and so on.
    """
    curves = {row: {one["seed"]: task_curves(one["record"])[0] for one in runs} for row, runs in results.items()}
    found = {row: _cells("accuracy", of) for row, of in curves.items()}
    if {*gains["of"], *gains["over"]} <= {*results}:
        for row in gains["of"]:
            seeds = [seed for seed in curves[row] if all(seed in curves[other] for other in gains["over"])]
            means = {seed: np.mean([curves[other][seed] for other in gains["over"]], axis=0) for seed in seeds}
            found[row] |= _cells("gain", {s: curves[row][s] / means[s] - 1 for s in seeds}, gains["paper"])
    return replace(table, rows={row: {**cells, **found[row]} for row, cells in table.rows.items()})


def _cells(name: str, curves: Mapping[int, FloatArray], paper: Sequence[float | None] = ()) -> dict[str, Cell]:
    """A cell for each task after which there is a number."""
    longest = max(map(len, curves.values()), default=0)
    told = [*paper, *[None] * longest]
    values = [
        {seed: float(curve[t]) for seed, curve in curves.items() if np.isfinite(curve[t : t + 1]).any()}
        for t in range(longest)
    ]
    return {f"{name}_after_{t + 1}/clients": Cell(of, told[t]) for t, of in enumerate(values) if of}
