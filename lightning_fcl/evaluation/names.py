"""What the models, tasks and experiences of a record are called where people read of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fcl.errors import listed


def model_name(model: str) -> str:
    return "mean of the clients" if model == "clients" else f"client {model}" if model.isdigit() else model


def task_name(record: Mapping[str, Any], model: str, task: int) -> str:
    """The groups of a model's task."""
    return listed((record["groups"][group] for group in record["tasks"][model][task]), most=12)


def experience_names(record: Mapping[str, Any]) -> list[str]:
    """What the server's experiences are called: by their groups, or their numbers where names would be too long."""
    names = [", ".join(record["groups"][group] for group in groups) for groups in record["tasks"].get("server", [])]
    distinct = len(set(names)) == len(names) and max(map(len, names), default=0) <= 24
    return names if distinct else [str(number + 1) for number in range(len(names))]


def experience_labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands for each experience of several runs: by name, if it is the same in all of them."""
    names, numbers = (
        experience_names(records[0]),
        [str(n + 1) for n in range(len(records[0]["tasks"].get("server", [])))],
    )
    if names != numbers and all(experience_names(record) == names for record in records):
        return [f"after {name}" for name in names]
    return [f"after experience {number}" for number in numbers]


def extent_of(results: Mapping[str, Any]) -> str:
    """How many rounds and clients a run had."""
    clients = [model for model in results["record"]["tasks"] if model != "server"]
    counts = {"round": len(results["record"]["rounds"]), "client": len(clients)}
    return ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items())
