"""The section ``recipe`` of a recipe: the name, the values of a paper, and the tasks and samples of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RecipeInfo:
    """The section ``recipe`` of a recipe.

    Args:
        paper: Short name of the paper.
        row: Name of the row in the paper's table.
        name: Name of the recipe, by which W&B and MLflow group runs. Empty: the name of the recipe's file, or of the
            paper and the row.
        expected_metrics: Metric values from the paper, by the name of the metric.
        eval_split: Samples that models are evaluated on: ``"test"``, or ``"validation"`` to tune hyperparameters.
        first_tasks: Number of tasks to train. Each client trains only its first tasks, and ``max_epochs`` is ignored.
            None trains all tasks.
        searched: Value of each option of a sweep, by the name of the option. Tables that compare runs have a column for
            each of these options.
    """

    paper: str = ""
    row: str = ""
    name: str = ""
    expected_metrics: dict[str, float] = field(default_factory=dict)
    eval_split: Literal["test", "validation"] = "test"
    first_tasks: int | None = None
    searched: dict[str, Any] = field(default_factory=dict)
