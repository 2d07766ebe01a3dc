"""The batches of a client's local training: which samples make up each, and the samples themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


class ClientData:
    """One client's samples of a round: read when they are first asked for, and kept as long as this lives.

    Args:
        read: Reads them.

    Example:
        >>> ClientData(lambda: [torch.zeros(3, 2), torch.tensor([0, 1, 0])]).samples()[1]
        tensor([0, 1, 0])
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def samples(self) -> Any:
        """The samples, stacked: ``[x, y]``, or what a data set's items hold."""
        return self._samples

    @cached_property
    def _samples(self) -> Any:
        return self._read()


def round_half_up(value: float) -> int:
    """The nearest whole number, halves up: 0.5 clients are one client.

    Example:
        >>> [round_half_up(v) for v in (0.4, 0.5, 2.5)]
        [0, 1, 3]
    """
    return int(value + 0.5)


def plan_batches(
    samples: int,
    batch_size: int,
    epochs: int,
    shuffle: bool,
    generator: torch.Generator,
    remembered: int = 0,
    drop_last: bool = False,
) -> list[Tensor]:
    """Which samples make up each batch of a client's local training.

    Args:
        samples: Number of the client's samples.
        batch_size: Samples per batch; the last batch of an epoch may be smaller.
        epochs: Local epochs.
        shuffle: Whether every epoch has an order of its own.
        generator: Draws the orders.
        remembered: Number of rehearsed samples, numbered from ``samples`` on; each joins one batch of every epoch.
        drop_last: Whether an incomplete last batch is left out, unless it is the only one.

    Returns:
        One index tensor per step.

    Example:
        >>> plan_batches(5, 2, 1, False, torch.Generator(), remembered=1)
        [tensor([0, 1, 5]), tensor([2, 3]), tensor([4])]
    """
    plan: list[Tensor] = []
    for _ in range(epochs):
        order = torch.randperm(samples, generator=generator) if shuffle else torch.arange(samples)
        parts = torch.split(order, batch_size)
        if drop_last and len(parts) > 1 and len(parts[-1]) < batch_size:
            parts = parts[:-1]
        if remembered:
            extra = samples + (torch.randperm(remembered, generator=generator) if shuffle else torch.arange(remembered))
            parts = tuple(torch.cat(pair) for pair in zip(parts, extra.tensor_split(len(parts)), strict=True))
        plan.extend(parts)
    return plan


def batches(data: Any, plan: Sequence[Tensor]) -> Iterator[Any]:
    """The batches of a plan, from samples stacked in any nest of lists and dicts of tensors."""
    for indices in plan:
        yield apply_to_collection(data, Tensor, lambda value, indices=indices: value[indices])


def cohort_batches(
    data: Sequence[Any], plans: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[list[Tensor], int, Tensor]]:
    """Batches of several clients side by side, padded where they are unequal.

    Args:
        data: ``[x, y]`` of each client.
        plans: The batches of each client, the longest plan first.

    Yields:
        ``[x, y]`` of shapes (clients, batch, ...) and (clients, batch); the number of clients whose plan is not over;
        the share of every sample in its client's mean, shape (clients, batch), 0 for padding.
    """
    x, y = (torch.cat([client[position] for client in data]) for position in (0, 1))
    steps = len(plans[0])
    lengths = [[row.shape[0] for row in plan] + [0] * (steps - len(plan)) for plan in plans]
    sizes = torch.tensor(lengths)
    real = torch.arange(int(sizes.max())) < sizes[:, :, None]
    offsets = torch.tensor([0, *[client[1].shape[0] for client in data[:-1]]]).cumsum(0)
    index = torch.zeros(real.shape, dtype=torch.long)
    index[real] = torch.cat([row for plan in plans for row in plan])
    index += offsets[:, None, None]
    share = real / sizes.clamp(min=1)[:, :, None]
    active = (sizes > 0).sum(dim=0).tolist()
    widest = sizes.max(dim=0).values.tolist()
    for step in range(steps):
        chosen = index[:, step, : widest[step]]
        yield [x[chosen], y[chosen]], active[step], share[:, step, : widest[step]]
