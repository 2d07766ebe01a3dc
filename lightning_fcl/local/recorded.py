"""What a step logs while clients train side by side: recorded for each, and logged once for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.protocol import Vectorizable

METRIC = "its step updates a torchmetrics object; numbers that it logs are brought together for all clients"
"""Why a step cannot run for several clients at once that measures."""

_SIGNATURE = inspect.signature(L.LightningModule.log)
_REDUCTIONS: dict[object, str] = {
    **{name: name for name in ("mean", "sum", "max", "min")},
    **{"avg": "mean", torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"},
    **{sum: "sum", max: "max", min: "min"},
}


@dataclass(frozen=True)
class Line:
    """Something that a step logs: all but its value.

    Args:
        name: Its name.
        flags: The other arguments of `log`.
        reduction: How the values of an epoch come together: ``mean``, ``sum``, ``max`` or ``min``.
        size: What a client's value weighs in a mean.
    """

    name: str
    flags: dict[str, Any]
    reduction: str
    size: int


class Recorder:
    """Stands in the place of a module's `log` while a step runs, and of its `count_loss`, if it has one.

    Args:
        module: The module.

    Attributes:
        lines: What the step has logged, in order.
        values: Their values.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.lines: list[Line] = []
        self.values: list[Tensor] = []
        self._module = module
        self._batch: Batch = None

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[None]:
        """Record what a step on a batch logs, and forget what others have."""
        self.lines, self.values, self._batch = [], [], batch
        own = vars(self._module)
        stand_ins: dict[str, Callable[..., None]] = {"log": self._record}
        if isinstance(self._module, Vectorizable):
            stand_ins["count_loss"] = self._count
        before = {name: own[name] for name in stand_ins if name in own}
        own.update(stand_ins)
        try:
            yield
        finally:
            for name in stand_ins:
                del own[name]
            own.update(before)

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        flags = dict(_SIGNATURE.bind(None, name, value, *args, **kwargs).arguments)
        for known in ("self", "name", "value"):
            del flags[known]
        reduction = _REDUCTIONS.get(flags.get("reduce_fx", "mean"))
        if isinstance(value, Metric):
            raise ValueError(METRIC)
        if not isinstance(value, Tensor | int | float) or reduction is None:
            raise ValueError(f"its step logs `{name}`, which is no number, or reduced in a way of its own")
        size = flags.pop("batch_size", None)
        if size is None:
            size = extract_batch_size(self._batch) if flags.get("on_epoch") and reduction == "mean" else 1
        self._keep(Line(name, flags, reduction, int(size)), value)

    def _count(self, total: Tensor, samples: int) -> None:
        self._keep(Line("", {"samples": samples}, "sum", 1), total)

    def _keep(self, line: Line, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()  # which a step may go on to change
        else:
            value = torch.tensor(value, dtype=torch.get_default_dtype(), device=self._module.device)
        self.lines.append(line)
        self.values.append(value.reshape(()))

    def replay(self, groups: Sequence[tuple[Sequence[Line], Sequence[Tensor]]]) -> None:
        """Log once what several groups of clients have logged.

        Args:
            groups: For each the lines, and of every line the clients' values, shape (clients,).
        """
        found: dict[tuple[str, int], tuple[Line, list[Tensor], list[int]]] = {}
        for lines, columns in groups:
            often: dict[str, int] = {}
            for line, values in zip(lines, columns, strict=True):
                often[line.name] = often.get(line.name, 0) + 1
                _, all_values, sizes = found.setdefault((line.name, often[line.name]), (line, [], []))
                all_values.append(values)
                sizes += [line.size if line.name else line.flags["samples"]] * len(values)
        for line, parts, sizes in found.values():
            values = torch.cat(parts)
            if not line.name and isinstance(self._module, Vectorizable):
                self._module.count_loss(values.sum(), sum(sizes))
            elif line.reduction == "mean":
                weights = torch.tensor(sizes, device=values.device)
                mean = (values * weights).sum() / weights.sum()
                self._module.log(line.name, mean, **line.flags, batch_size=sum(sizes))
            else:
                self._module.log(line.name, _AMONG[line.reduction](values), **line.flags, batch_size=sum(sizes))


_AMONG: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
