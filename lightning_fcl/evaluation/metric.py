"""The dataclass `Metric`, and functions that apply a formula to the models of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from lightning_fcl.evaluation.continual import finite_mean
from lightning_fcl.evaluation.record import ACCURACY, Evaluation, ModelHistory, Quantity

Unit: TypeAlias = Literal["", "B", "s", "uploads", "rounds", "samples"]
"""Unit of a metric: "" for no unit, bytes, seconds, or a count."""


class Score(NamedTuple):
    """A value of a metric.

    Args:
        model: ``"server"``, a client's id, ``"clients"`` for the mean over clients, or ``"total"`` for the whole
            federation. Empty if the metric's key contains no model.
        value: Value. NaN if it cannot be computed.
        number: Number that replaces ``{number}`` in the metric's name.
    """

    model: str
    value: float
    number: int = 0


@dataclass(frozen=True)
class Metric:
    """A metric of a run. Results, reports, tables and listings read this description.

    Args:
        name: Name in ``results.json``, without ``/MODEL`` at the end. The name may contain ``{number}``.
        function: Function that returns the scores of an `Evaluation`.
        direction: Direction of better values. ``"quantity"`` means the direction of the evaluated quantity.
        description: Description in one line. ``{quantity}`` is replaced by the name of the quantity: accuracy, or a
            measure of a module.
        unit: Unit of the value.
        measure_name: Name of the metric if a module is evaluated by a quantity other than accuracy. ``{measure}`` is
            replaced by the name of the quantity. None if the metric is only defined for accuracy. Default: ``name``.
        title: Heading in reports. Default: ``name`` with spaces.

    Example:
        >>> rounds = [{"round": 0, "experience": {"a": 0}, "correct": {"a": [8]}}]
        >>> record = {"groups": ["x"], "totals": [10], "tasks": {"a": [[0]]}, "rounds": rounds}
        >>> best = Metric("best", per_model(lambda model: model.overall.max()), "quantity", "highest {quantity}")
        >>> [(score.model, float(score.value)) for score in best.function(Evaluation(record, ACCURACY))]
        [('a', 0.8), ('clients', 0.8)]
    """

    name: str
    function: Callable[[Evaluation], Iterable[Score]]
    direction: Literal["maximize", "minimize", "quantity"]
    description: str
    unit: Unit = ""
    measure_name: str | None = ""
    title: str = ""

    def for_quantity(self, quantity: Quantity) -> Metric | None:
        """Return a copy of the metric for a quantity, or None if the metric is not defined for the quantity.

        The name, title, direction and description of the copy are those for the quantity.
        """
        name = self.name if quantity == ACCURACY or self.measure_name == "" else self.measure_name
        if name is None:
            return None
        name = name.replace("{measure}", quantity.name)
        direction = self.direction
        if direction == "quantity":
            direction = "maximize" if quantity.higher_is_better else "minimize"
        return replace(
            self,
            name=name,
            title=self.title if name == self.name else "",
            direction=direction,
            description=self.description.replace("{quantity}", quantity.name),
        )

    @property
    def about(self) -> str:
        """Description, followed by "higher is better" or "lower is better" if the direction is known."""
        ways = {"maximize": "; higher is better", "minimize": "; lower is better", "quantity": ""}
        return f"{self.description}{ways[self.direction]}"

    @property
    def heading(self) -> str:
        """Heading in reports."""
        return self.title or self.name.replace("_", " ")

    def key(self, score: Score) -> str:
        """Return the key of a score in ``results.json``."""
        name = self.name.replace("{number}", str(score.number))
        return f"{name}/{score.model}" if score.model else name

    def matches(self, name: str) -> bool:
        """Return whether a name without ``/model`` is the metric's name, with any number in place of ``{number}``."""
        return re.fullmatch(re.escape(self.name).replace(re.escape("{number}"), r"\d+"), name) is not None


def all_models(evaluation: Evaluation) -> list[ModelHistory]:
    """Return the histories of all tested models: the server and clients."""
    return evaluation.models


def clients(evaluation: Evaluation) -> list[ModelHistory]:
    """Return the histories of the tested models of clients."""
    return [history for history in evaluation.models if history.model != "server"]


def task_sequences(evaluation: Evaluation) -> list[ModelHistory]:
    """Return the histories of the tested models with at least two tasks."""
    return [history for history in evaluation.models if len(history.tasks) > 1]


def local_task_sequences(evaluation: Evaluation) -> list[ModelHistory]:
    """Return the histories of the models before aggregation, for the clients with at least two tasks."""
    return [history for history in evaluation.local_models if len(history.tasks) > 1]


def per_model(
    formula: Callable[[ModelHistory], float],
    models: Callable[[Evaluation], list[ModelHistory]] = all_models,
    number: Callable[[ModelHistory], int] = lambda history: 0,
) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a metric that has one value for each model. It also yields the mean over the clients.

    Args:
        formula: Function that returns the value of a model. NaN if the value is not defined.
        models: Function that returns the histories of the models with a value.
        number: Function that returns, for a model, the number in the metric's name.
    """
    return per_number(lambda history: {number(history): formula(history)}, models)


def per_number(
    formula: Callable[[ModelHistory], dict[int, float]],
    models: Callable[[Evaluation], list[ModelHistory]] = all_models,
) -> Callable[[Evaluation], Iterator[Score]]:
    """Return the function of a metric that has several values for each model. It also yields the means over clients.

    Args:
        formula: Function that returns the values of a model, by the number in the metric's name. NaN if a value is not
            defined.
        models: Function that returns the histories of the models with values.
    """

    def scores(evaluation: Evaluation) -> Iterator[Score]:
        of_clients: dict[int, list[float]] = {}
        for history in models(evaluation):
            for number, value in formula(history).items():
                yield Score(history.model, value, number)
                if history.model != "server":
                    of_clients.setdefault(number, []).append(value)
        for number, values in of_clients.items():
            yield Score("clients", finite_mean(values), number)

    return scores
