"""What a module logs for a round in its training steps, reduced over the batches of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from torchmetrics import Metric

from lightning_fcl.callbacks.epoch_log import EpochLog, one_number, reduced
from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.ranks import Ranks

_SHOWN = ("prog_bar", "logger")


class EpochLogs:
    """Stands before a module's `log` while it trains: keeps what is for the round, and logs that when all have met.

    Args:
        module: The module. It is unchanged where there is one process.
        ranks: The processes.
    """

    def __init__(self, module: L.LightningModule, ranks: Ranks) -> None:
        self._module, self._ranks, self._log = module, ranks, module.log
        self._kept, self._options = EpochLog(), dict[str, dict[str, Any]]()
        self._training = False
        if ranks.number > 1:
            # A function, not a method: copies of the module leave the processes alone.
            module.log = lambda *args, **kwargs: self._keep(*args, **kwargs)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the module its own `log` back."""
        if self._ranks.number > 1:
            del self._module.log

    def train(self, batch: Batch) -> None:
        """A batch is trained on from here on; None: it is over."""
        self._training, self._kept.batch = batch is not None, batch

    def _keep(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._training or not kwargs.get("on_epoch"):
            self._log(name, value, *args, **kwargs)
            return
        steps = bool(kwargs.get("on_step", True))
        self._kept(name, value, *args, **kwargs)
        self._options[name] = {option: kwargs[option] for option in _SHOWN if option in kwargs} | {"steps": steps}
        if steps:
            self._log(f"{name}_step", value, *args, **{**kwargs, "on_epoch": False})

    def meet(self) -> None:
        """At the end of a round: log what all processes together have come to."""
        self.train(None)
        kept, self._kept = self._kept, EpochLog()
        options, self._options = self._options, {}
        if self._ranks.number == 1:
            return
        states = {name: _states(metric) for name, metric in kept.metrics.items() if metric is not None}
        numbers = {name: [(value.cpu(), size) for value, size in found] for name, found in kept.numbers.items()}
        shared = self._ranks.share((numbers, kept.reductions, states, options))
        values = {}
        for name, metric in kept.metrics.items():
            if metric is not None:
                values[name] = _merged(name, metric, [theirs[2][name] for theirs in shared if name in theirs[2]])
                metric.reset()
            else:
                every = [one for theirs in shared for one in theirs[0].get(name, [])]
                values[name] = float(reduced(every, kept.reductions[name]))
        every_value: dict[str, float] = {}
        for theirs in reversed(self._ranks.share(values)):
            every_value |= theirs  # of each the first process's that has it
        for name, value in sorted(every_value.items()):
            shown = dict(next(theirs[3][name] for theirs in shared if name in theirs[3]))
            if shown.pop("steps"):
                self._log(f"{name}_epoch", value, on_step=False, on_epoch=True, batch_size=1, **shown)
                shown = {"logger": False}
            self._log(name, value, on_step=False, on_epoch=True, batch_size=1, **shown)


def _states(metric: Metric) -> list[Tensor]:
    """The states of a metric that processes gather, in its order."""
    found: list[Tensor] = []

    def keep(value: Tensor, group: Any = None) -> list[Tensor]:
        found.append(value.detach().cpu())
        return [value]

    metric.sync(dist_sync_fn=keep, distributed_available=lambda: True)
    metric.unsync()
    return found


def _merged(name: str, metric: Metric, states: Sequence[Sequence[Tensor]]) -> float:
    """What a metric comes to by the states of several processes together."""
    columns = iter(zip(*states, strict=True))

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        return [part.to(value.device) for part in next(columns)]

    metric.sync(dist_sync_fn=gather, distributed_available=lambda: True)
    compute: Callable[[Metric], Any] = type(metric).compute  # unlike its own, it does not sync, or remember
    value = float(one_number(name, compute(metric)))
    metric.unsync()
    return value
