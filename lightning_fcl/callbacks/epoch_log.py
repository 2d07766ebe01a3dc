"""What a module logs for an epoch, kept until its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_fcl.data.batches import Batch

# Of numbers and the sizes of their batches, both of shape (batches,).
_REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "avg": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "sum": lambda numbers, sizes: numbers.sum(),
    "min": lambda numbers, sizes: numbers.amin(),
    "max": lambda numbers, sizes: numbers.amax(),
}


class EpochLog:
    """Takes the place of a module's `log`: keeps what Lightning would reduce at the end of an epoch."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric | None] = {}  # by name, None for numbers
        self.batch: Batch = None
        self.numbers: dict[str, list[tuple[Tensor, int]]] = {}  # by name, with the sizes of their batches
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
        self.numbers.setdefault(name, []).append((one_number(name, value).clone(), batch_size))
        self.reductions[name] = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__

    def value(self, name: str) -> float | None:
        """What a name came to; None where that is not finite."""
        if (metric := self.metrics[name]) is not None:
            value = one_number(name, metric.compute())
        else:
            value = reduced(self.numbers[name], self.reductions[name])
        return float(value) if bool(torch.isfinite(value)) else None


def one_number(name: str, value: Any) -> Tensor:
    number = torch.as_tensor(value).detach()
    if number.numel() != 1:
        raise ValueError(f"Expected `{name}` to be logged as one number but got {value}. Log each under a name.")
    return number.reshape(())


def reduced(numbers: Sequence[tuple[Tensor, int]], reduction: str) -> Tensor:
    """Numbers and the sizes of their batches as Lightning reduces them."""
    values, sizes = zip(*numbers, strict=True)
    return _REDUCED[reduction](torch.stack([value.cpu().double() for value in values]), torch.tensor(sizes))
