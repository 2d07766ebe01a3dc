"""Recording of the values that a vectorized step logs for each client, so that each value is logged only once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torchmetrics import Metric, MetricCollection

from lightning_fcl.data.batching import Batch
from lightning_fcl.federation.obstacles import ObstacleError, Reason
from lightning_fcl.federation.protocols import Vectorizable
from lightning_fcl.federation.reductions import METRIC_REDUCTIONS

_SIGNATURE = inspect.signature(L.LightningModule.log)
_REDUCTIONS: dict[object, str] = {
    **{name: name for name in ("mean", "sum", "max", "min")},
    **{"avg": "mean", torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"},
    **{sum: "sum", max: "max", min: "min"},
}


@dataclass(frozen=True)
class LogEntry:
    """The name and the other `log` arguments of a value that a step logs. The value itself is stored separately.

    Args:
        name: Name of the value. Empty for a call of `update_train_loss`.
        log_options: Other arguments of `log`, except ``batch_size``. Also ``metric_attribute`` (the name of a logged
            metric object in the module), or ``samples`` (for a call of `update_train_loss`).
        reduction: Reduction of the values of an epoch: ``mean``, ``sum``, ``max`` or ``min``. ``metric`` for a metric
            object.
        size: Weight of a client's value in a mean.
    """

    name: str
    log_options: dict[str, Any]
    reduction: str
    size: int


@dataclass(frozen=True)
class MetricUpdate:
    """An update of a metric in a step, without the tensors.

    Args:
        metric: Name of the metric in the module.
        is_called: True if the step calls the metric object, False if the step calls the metric's `update`.
        arguments_spec: Structure of the nested arguments.
    """

    metric: str
    is_called: bool
    arguments_spec: TreeSpec


class _BatchValue:
    """The result of calling a metric in a vectorized step. Reading an attribute raises ObstacleError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ObstacleError(Reason.METRIC)


class LogRecorder:
    """A recorder of the values that a step logs. It replaces functions of the module while the step runs.

    The replaced functions are `log`, `update_train_loss` (if defined), and `forward`, `update`, `compute` and `reset`
    of each metric in the module.

    Args:
        module: The module.

    Attributes:
        lines: Logged values and metric updates of the step, in order, without their tensors.
        values: The tensors for each line. For a `LogEntry`, the value, or an empty list if a metric object is logged.
            For a `MetricUpdate`, a list of the arguments.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.lines: list[LogEntry | MetricUpdate] = []
        self.values: list[Any] = []
        self._module = module
        parts = dict(module.named_modules())
        self._metrics = {name: part for name, part in parts.items() if isinstance(part, Metric | MetricCollection)}
        self._batch: Batch = None
        attributes = vars(module)
        self._stand_ins: list[tuple[dict[str, Any], str, Callable[..., Any]]] = [(attributes, "log", self._record)]
        self._counts = module if isinstance(module, Vectorizable) else None
        if self._counts is not None:
            self._stand_ins.append((attributes, "update_train_loss", self._count))
        for name, metric in self._metrics.items():
            for function, stand_in in (
                ("forward", partial(self._measure, name, True)),
                ("update", partial(self._measure, name, False)),
                ("compute", _refuse_value),
                ("reset", _refuse_value),
            ):
                self._stand_ins.append((vars(metric), function, stand_in))

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[None]:
        """Temporarily record the values that a step on a batch logs. Earlier records are deleted."""
        self.lines, self.values, self._batch = [], [], batch
        previous_functions = [own.get(function) for own, function, _ in self._stand_ins]
        for attributes, function, stand_in in self._stand_ins:
            attributes[function] = stand_in
        try:
            yield
        finally:
            for (attributes, function, _), previous_function in zip(self._stand_ins, previous_functions, strict=True):
                if previous_function is None:
                    del attributes[function]
                else:
                    attributes[function] = previous_function

    def _measure(self, name: str, is_called: bool, *args: Any, **kwargs: Any) -> _BatchValue | None:
        values, arguments_spec = tree_flatten((args, kwargs))
        if not (values and all(isinstance(value, Tensor) for value in values)):
            raise ObstacleError(Reason.METRIC)
        self.lines.append(MetricUpdate(name, is_called, arguments_spec))
        self.values.append([value.detach().clone() for value in values])
        return _BatchValue() if is_called else None

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        flags = dict(_SIGNATURE.bind(None, name, value, *args, **kwargs).arguments)
        for argument in ("self", "name", "value"):
            del flags[argument]
        if isinstance(value, Metric | _BatchValue):
            names = [attribute for attribute, metric in self._metrics.items() if metric is value]
            if not names:
                raise ObstacleError(Reason.METRIC)
            self.lines.append(LogEntry(name, {**flags, "metric_attribute": names[0]}, "metric", 0))
            self.values.append([])
            return
        reduction = _REDUCTIONS.get(flags.get("reduce_fx", "mean"))
        if not isinstance(value, Tensor | int | float) or reduction is None:
            raise ObstacleError(Reason.LOG_VALUE, name)
        size = flags.pop("batch_size", None)
        if size is None:
            size = extract_batch_size(self._batch) if flags.get("on_epoch") and reduction == "mean" else 1
        self._keep(LogEntry(name, flags, reduction, int(size)), value)

    def _count(self, total: Tensor, samples: int) -> None:
        self._keep(LogEntry("", {"samples": samples}, "sum", 1), total)

    def _keep(self, line: LogEntry, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            # The step may change the tensor after logging.
            value = value.detach().clone()
        else:
            value = torch.tensor(value, dtype=torch.get_default_dtype(), device=self._module.device)
        self.lines.append(line)
        self.values.append(value.reshape(()))

    def replay(self, groups: Sequence[tuple[Sequence[LogEntry | MetricUpdate], Sequence[Any]]]) -> None:
        """Log the recorded values once for all clients, and update the metrics with the recorded arguments.

        Args:
            groups: For each group of clients: the recorded lines, and the clients' values of each line, shape
                (clients, ...).
        """
        metric_entries: dict[str, LogEntry] = {}
        values_by_entry: dict[tuple[str, int], tuple[LogEntry, list[Tensor], list[int]]] = {}
        for lines, columns in groups:
            name_counts: dict[str, int] = {}
            for line, values in zip(lines, columns, strict=True):
                if isinstance(line, MetricUpdate):
                    self._update(line, values)
                    continue
                if line.reduction == "metric":
                    metric_entries[line.name] = line
                    continue
                name_counts[line.name] = name_counts.get(line.name, 0) + 1
                _, all_values, sizes = values_by_entry.setdefault((line.name, name_counts[line.name]), (line, [], []))
                all_values.append(values)
                sizes += [line.size if line.name else line.log_options["samples"]] * len(values)
        for line, parts, sizes in values_by_entry.values():
            values = torch.cat(parts)
            if not line.name and self._counts is not None:
                self._counts.update_train_loss(values.sum(), sum(sizes))
            else:
                value = METRIC_REDUCTIONS[line.reduction](values, torch.tensor(sizes, device=values.device))
                self._module.log(line.name, value, **line.log_options, batch_size=sum(sizes))
        for name, line in metric_entries.items():
            metric = self._metrics[line.log_options["metric_attribute"]]
            # A `MetricCollection` cannot be logged as an object, so it has no entry here.
            if isinstance(metric, Metric):
                self._module.log(name, metric, **line.log_options)

    def _update(self, line: MetricUpdate, values: Sequence[Tensor]) -> None:
        """Update a metric once per client. Arguments are not concatenated, because they may have any shape."""
        metric = self._metrics[line.metric]
        for client_values in zip(*values, strict=True):
            args, kwargs = tree_unflatten(list(client_values), line.arguments_spec)
            (metric if line.is_called else metric.update)(*args, **kwargs)


def _refuse_value(*args: Any, **kwargs: Any) -> NoReturn:
    raise ObstacleError(Reason.METRIC)
