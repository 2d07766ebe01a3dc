"""The entries of a run's record that describe the stream: tasks, kind of scenario, and samples of the clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as L
import numpy as np

from lightning_fcl.data.scenarios import Plan
from lightning_fcl.tasks.classification import Classifier


def describe_plan(plan: Plan, module: L.LightningModule, clients: Iterable[str]) -> dict[str, Any]:
    """Return the entries ``tasks``, ``scenario`` and ``client_samples`` of a record.

    Args:
        plan: Plan of the stream.
        module: The module that is trained.
        clients: Clients whose models are tested.
    """
    tasks: dict[str, list[list[int]]] = {client: [list(t) for t in parts] for client, parts in plan.tasks.items()}
    longest = max(len(parts) for parts in tasks.values())
    tasks["server"] = [
        sorted({group for parts in plan.tasks.values() for group in parts[min(e, len(parts) - 1)]})
        for e in range(longest)
    ]
    return {
        "tasks": tasks,
        "scenario": _scenario_kind(plan, module),
        "client_samples": {client: _count_groups(plan, client) for client in clients},
    }


def _scenario_kind(plan: Plan, module: L.LightningModule) -> str:
    """Return ``"task"``, ``"domain"`` or ``"class"``, as in van de Ven and Tolias 2019.

    ``"task"``: predictions are among the classes of a sample's task. ``"domain"``: the test groups are domains.
    ``"class"``: the test groups are classes, and a model does not know the task of a sample.
    """
    if isinstance(module, Classifier) and module.task_incremental:
        return "task"
    return "class" if plan.groups_are_classes else "domain"


def _count_groups(plan: Plan, client: str) -> list[list[int]]:
    """Return a pair ``[group, number]`` for each test group of a client's different training samples."""
    groups, numbers = np.unique(plan.groups[plan.client_indices(client)], return_counts=True)
    return [[group, number] for group, number in zip(groups.tolist(), numbers.tolist(), strict=True)]
