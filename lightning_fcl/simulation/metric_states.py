"""States of torchmetrics metrics: reading, replacing, and merging over the clients of several processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum
from torchmetrics.wrappers import Running

Value = Tensor | list[Any]


class MetricState(NamedTuple):
    """The state of a metric: its values by name, and the number of updates since the last reset.

    Args:
        values: The values of the states that the metric declares with `add_state`.
        updates: The number of updates.
        is_reset: Whether the metric was reset while the clients trained. Values of earlier clients are then discarded.
    """

    values: dict[str, Value]
    updates: int
    is_reset: bool = False

    def on_cpu(self) -> MetricState:
        """Return the state with its tensors on the CPU, without gradients."""
        return self._replace(values=apply_to_collection(self.values, Tensor, lambda value: value.detach().cpu()))


def state_of(metric: Metric) -> MetricState:
    """Return the current state of a metric, without a copy."""
    return MetricState(metric.metric_state, metric._update_count)


def default_state(metric: Metric) -> MetricState:
    """Return the state that a metric has after `reset`."""
    defaults = metric._defaults.items()
    return MetricState({n: v.detach().clone() if isinstance(v, Tensor) else [] for n, v in defaults}, 0)


def set_state(metric: Metric, state: MetricState) -> None:
    """Replace the state of a metric, and drop the value that `compute` has cached."""
    for name, value in state.values.items():
        is_on_cpu = isinstance(value, list) and metric.compute_on_cpu
        setattr(metric, name, value if is_on_cpu else apply_to_collection(value, Tensor, Tensor.to, metric.device))
    metric._update_count, metric._computed = state.updates, None


def is_mergeable(metric: Metric) -> bool:
    """Return whether the states of clients that trained separately can be merged into one state.

    A tensor state whose ``dist_reduce_fx`` is None is stacked over clients, as torchmetrics does for several processes.
    The metric then has to reduce the stack in `compute`. A call of `compute` with three default states tests whether
    the metric does so.
    """
    if isinstance(metric, Running):  # The window contains the last updates of only one process.
        return False
    stacked = [name for name, default in metric._defaults.items() if _is_stacked(metric._reductions[name], default)]
    if not stacked:
        return True
    trial, default = metric.clone(), default_state(metric)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            set_state(trial, default._replace(updates=1))
            expected_shape = torch.as_tensor(trial.compute()).shape
            set_state(trial, merged(trial, [default._replace(updates=1)] * 3))
            return torch.as_tensor(trial.compute()).shape == expected_shape
    except Exception:
        return False


def merged(metric: Metric, states: Sequence[MetricState]) -> MetricState:
    """Return one state of a metric that combines several states, in their order.

    States from before the last reset are left out.

    Args:
        metric: The metric, which defines the reduction of each state. The metric does not change.
        states: The states, each accumulated from the default state.
    """
    last_reset = max((place for place, state in enumerate(states) if state.is_reset), default=0)
    used_states = [state for state in states[last_reset:] if state.updates]
    if not used_states:
        return default_state(metric)
    updates = [state.updates for state in used_states]
    values = {
        name: _reduced(reduction, metric._defaults[name], [state.values[name] for state in used_states], updates)
        for name, reduction in metric._reductions.items()
    }
    return MetricState(values, sum(updates))


class RoundMetrics:
    """A record of metric states in a round, for each group of clients that train at the same time.

    For each group a metric starts with its default state. Between groups the metric has the state from before the
    round. At the end of the round, `merge` combines these states.

    Args:
        metrics: The metrics by path.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._group: int | None = None  # the current group
        self._shared: dict[str, MetricState] = {}  # states from before the round
        self._states: dict[int, dict[str, MetricState]] = {}  # states of each group
        self._updates: dict[str, int] = {}  # number of updates at the last check
        self._reset: set[str] = set()  # metrics that the group has reset

    def enter(self, group: int) -> None:
        """Load the metric states of a group, so that its training can start or continue."""
        states = self._states.get(group, {})
        self._group = group
        self._reset = {name for name, state in states.items() if state.is_reset}
        for name, metric in self._metrics.items():
            self._shared[name] = state_of(metric)
            set_state(metric, states.get(name) or default_state(metric))
            self._updates[name] = metric.update_count

    def watch(self) -> None:
        """Record which metrics the group has reset since the last call."""
        if self._group is not None:
            for name, metric in self._metrics.items():
                if metric.update_count < self._updates[name]:
                    self._reset.add(name)
                self._updates[name] = metric.update_count

    def leave(self) -> None:
        """Save the metric states of the current group, and restore the states from before the round."""
        if self._group is None:
            return
        self.watch()
        self._states[self._group] = {
            name: state_of(metric)._replace(is_reset=name in self._reset)
            for name, metric in self._metrics.items()
            if metric.update_count or name in self._reset
        }
        for name, metric in self._metrics.items():
            set_state(metric, self._shared[name])
        self._group = None

    def contributions(self) -> dict[int, dict[str, MetricState]]:
        """Return the metric states of this process's groups, on the CPU, to send them to other processes."""
        return {group: {name: state.on_cpu() for name, state in own.items()} for group, own in self._states.items()}

    def merge(self, groups: Mapping[int, Mapping[str, MetricState]]) -> None:
        """Add the states of the groups of all processes to the metrics, in the order of the groups."""
        for name, metric in self._metrics.items():
            states = [found[name] for found in groups.values() if name in found]
            if states:
                set_state(metric, merged(metric, [state_of(metric), *states]))


def _reduced(reduction: Any, default: Value, values: Sequence[Value], updates: Sequence[int]) -> Value:
    if isinstance(default, list):
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    first, *other_tensors = tensors = [torch.as_tensor(value) for value in values]
    if _is_stacked(reduction, default):
        return torch.cat([value if value.ndim > default.ndim else value[None] for value in tensors])
    if not other_tensors:
        return first
    if reduction is dim_zero_cat:
        return torch.cat(tensors)
    if reduction is dim_zero_sum:
        start = default.to(first.device)
        for value in other_tensors:
            first = first + (value - start if bool(start.any()) else value)  # Add a nonzero default only once.
        return first
    if reduction is dim_zero_mean:
        return _mean(tensors, updates)
    return torch.as_tensor(reduction(torch.stack(tensors)))


def _mean(values: Sequence[Tensor], updates: Sequence[int]) -> Tensor:
    """Return the mean of values, weighted by their numbers of updates. Equal values are returned without rounding."""
    if all(torch.equal(value, values[0]) for value in values):
        return values[0]
    total = sum(value.double() * number for value, number in zip(values, updates, strict=True))
    return (torch.as_tensor(total) / sum(updates)).to(values[0].dtype)


def _is_stacked(reduction: Any, default: Value) -> bool:
    return reduction is None and isinstance(default, Tensor)
