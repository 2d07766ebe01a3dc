"""Replacements for a module's `log` that collect values, and reduce them over an epoch or over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_fcl.data.batching import Batch
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.federation.ranks import Ranks
from lightning_fcl.federation.reductions import METRIC_REDUCTIONS

_SHOWN = ("prog_bar", "logger")


class EpochLog:
    """Replacement for a module's `log` that collects the values that Lightning would reduce at the end of an epoch."""

    def __init__(self) -> None:
        # The logged metric objects by name. None for a name with plain numbers.
        self.metrics: dict[str, Metric | None] = {}
        self.batch: Batch = None
        # Logged values by name, each with the size of its batch.
        self.scalar_values: dict[str, list[tuple[Tensor, int]]] = {}
        self.reductions: dict[str, str] = {}

    def __call__(
        self,
        name: str,
        value: Any,
        *args: Any,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if on_epoch is False:
            return
        self.metrics[name] = value if isinstance(value, Metric) else None
        if isinstance(value, Metric):
            return
        if batch_size is None:
            batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        self.scalar_values.setdefault(name, []).append((_one_number(name, value).clone(), batch_size))
        self.reductions[name] = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__

    def value(self, name: str) -> float | None:
        """Return the values that were logged under a name, reduced to one number. None if the number is non-finite."""
        if (metric := self.metrics[name]) is not None:
            value = _one_number(name, metric.compute())
        else:
            value = _reduced(self.scalar_values[name], self.reductions[name])
        return float(value) if bool(torch.isfinite(value)) else None


class RoundLog:
    """Replacement for a module's `log` during training. Values of a round are reduced over all processes.

    Values that a training batch logs with ``on_epoch=True`` are collected, and logged at the end of the round. With a
    single process, the module is unchanged.
    """

    def __init__(self, module: L.LightningModule, ranks: Ranks) -> None:
        self._module, self._ranks, self._log = module, ranks, module.log
        self._kept, self._options = EpochLog(), dict[str, dict[str, Any]]()
        if ranks.num_ranks > 1:
            # A deep copy of the module would copy a bound method together with `self._ranks`. A function is not copied.
            module.log = lambda *args, **kwargs: self._keep(*args, **kwargs)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the module's own `log`."""
        if self._ranks.num_ranks > 1:
            del self._module.log

    def start_batch(self, batch: Batch) -> None:
        """Set the current training batch. None means that no training batch is running."""
        self._kept.batch = batch

    def _keep(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._kept.batch is None or not kwargs.get("on_epoch"):
            self._log(name, value, *args, **kwargs)
            return
        if isinstance(value, Metric) and all(part is not value for part in self._module.modules()):
            raise MissingValueError(
                f"Expected the metric logged as `{name}` to be an attribute of the module, but found no such "
                "attribute.",
                hint="Assign the metric to an attribute in `__init__`.",
                argument=name,
            )
        steps = bool(kwargs.get("on_step", True))
        self._kept(name, value, *args, **kwargs)
        self._options[name] = {option: kwargs[option] for option in _SHOWN if option in kwargs} | {"steps": steps}
        if steps:
            self._log(f"{name}_step", value, *args, **{**kwargs, "on_epoch": False})

    def reduce_and_log(self) -> None:
        """Log the values of the round, reduced over all processes. Call this at the end of a round."""
        epoch_log, self._kept = self._kept, EpochLog()
        options, self._options = self._options, {}
        if self._ranks.num_ranks == 1:
            return
        metrics = {path: part for path, part in self._module.named_modules() if isinstance(part, Metric)}
        paths = {id(metric): path for path, metric in metrics.items()}
        logged = {name: paths[id(metric)] for name, metric in epoch_log.metrics.items() if metric is not None}
        numbers = {
            name: [(value.cpu(), size) for value, size in found] for name, found in epoch_log.scalar_values.items()
        }
        shared = self._ranks.all_gather_object((numbers, epoch_log.reductions, logged, options))
        values: dict[str, float | Metric] = {}
        for rank_record in shared:
            # The states of a metric are already merged over all processes. After the epoch, Lightning computes and
            # resets the metric.
            values |= {name: metrics[path] for name, path in rank_record[2].items()}
            for name in rank_record[1].keys() - values.keys():
                scalars = [one for rank in shared for one in rank[0].get(name, [])]
                values[name] = float(_reduced(scalars, rank_record[1][name]))
        for name, value in sorted(values.items()):
            log_options = dict(next(theirs[3][name] for theirs in shared if name in theirs[3]))
            if log_options.pop("steps"):
                self._log(f"{name}_epoch", value, on_step=False, on_epoch=True, batch_size=1, **log_options)
                log_options = {"logger": False}
            self._log(name, value, on_step=False, on_epoch=True, batch_size=1, **log_options)


def _one_number(name: str, value: Any) -> Tensor:
    number = torch.as_tensor(value).detach()
    if number.numel() != 1:
        raise InvalidValueError(
            f"Expected `{name}` to be logged as one number, but got {value}.",
            hint="Log each number under its own name.",
            argument=name,
            value=value,
        )
    return number.reshape(())


def _reduced(numbers: Sequence[tuple[Tensor, int]], reduction: str) -> Tensor:
    """Return the reduction of logged numbers, computed as Lightning does.

    Args:
        numbers: Pairs of a logged number and the size of its batch.
        reduction: Name of the reduction.
    """
    values, sizes = zip(*numbers, strict=True)
    return METRIC_REDUCTIONS[reduction](torch.stack([value.cpu().double() for value in values]), torch.tensor(sizes))
