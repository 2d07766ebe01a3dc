"""A step that is traced once for each shape, and then replayed: the same operations, without Python between them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

AFTER = 1000
"""Steps of one shape before it is traced, which takes as long as some hundreds; the first time a second more."""

_KNOWN = ("torch.nn.modules.", "torchmetrics.", "lightning_fcl.")

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Any]]
"""``step(params, rest, batch)``: a list of tensors, in which None stands for a gradient that is not there."""


class TracedStep:
    """Replays a step from its `AFTER`-th on, where that gives the step's own bits; all others run as they are.

    What depends on anything but shapes and the tensors that it gets would be frozen as it was when it was traced. See
    `is_traceable`.

    Args:
        step: The step. It has no other effect than its result.
        after: Steps of one shape before it is traced; None: `AFTER`.

    Example:
        >>> double = TracedStep(lambda params, rest, batch: [2 * params[0]], after=1)
        >>> double([torch.ones(2)], [], []), double([3 * torch.ones(2)], [], [])
        ([tensor([2., 2.])], [tensor([6., 6.])])
        >>> double.traced
        1
    """

    def __init__(self, step: Step, after: int | None = None) -> None:
        self._step = step
        self._after = AFTER if after is None else after
        self._seen: Counter[object] = Counter()
        self._graphs: dict[object, Callable[..., list[Any]]] = {}

    @property
    def traced(self) -> int:
        """How many shapes are replayed."""
        return len(self._graphs)

    def __call__(self, params: list[Tensor], rest: list[Tensor], batch: list[Tensor]) -> list[Any]:
        """The step's result."""
        kind = tuple((value.shape, value.dtype, value.device) for part in (params, rest, batch) for value in part)
        if kind in self._graphs:
            with torch.no_grad():
                return self._graphs[kind](params, rest, batch)
        result = self._step(params, rest, batch)
        self._seen[kind] += 1
        if self._seen[kind] == self._after:
            self._trace(kind, (params, rest, batch), result)
        return result

    def _trace(self, kind: object, given: tuple[list[Tensor], ...], expected: Sequence[Any]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            graph = make_fx(self._step)(*given)
            with torch.no_grad():
                same = all(map(torch.equal, graph(*given), expected))
        except Exception as error:  # whatever it is, this step cannot be traced
            log.debug("A step is not traced: %s", error)
            return
        if same:
            self._graphs[kind] = graph


def is_traceable(module: nn.Module) -> bool:
    """Whether a module's step depends on its tensors alone: all its parts are torch's layers, or this library's.

    Example:
        >>> is_traceable(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
        True
    """
    return all(type(part).__module__.startswith(_KNOWN) for part in module.modules())
