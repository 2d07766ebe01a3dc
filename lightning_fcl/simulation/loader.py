"""The rounds of a federation: who takes part, and which batches they train on, in order."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.randomness import seed_of, start_randomness


@dataclass(frozen=True)
class BatchContext:
    """One batch's place in a round.

    Args:
        client_rounds: The clients that train on it, side by side.
        data: The data of each of these clients in this round, without rehearsed samples.
        first: Whether it is the first batch of these clients' local training.
        last: Whether it is the last one.
        last_of_round: Whether the round ends with it.
        active: Number of clients, from the front, that still train in this step.
        weight: Share of each sample in its client's mean, shape (clients, batch); None for a client on its own.
        epoch: Local epoch, from 0; of several clients, that of the one with most steps.
    """

    client_rounds: tuple[ClientRound, ...]
    data: tuple[Any, ...]
    first: bool
    last: bool
    last_of_round: bool
    active: int = 1
    weight: Tensor | None = None
    epoch: int = 0


def participants(
    plan: Plan, round: int, participation: float | int, seed: int, absent: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """The clients of a round, in the plan's order: those that train, and those that were chosen but have no data.

    Args:
        plan: Who has data in which round.
        round: Round, from 0.
        participation: Share (a float) or number (an int) of all clients; at least one client always trains.
        seed: Seed of the choice.
        absent: Clients that are gone; the choice among the others is not touched by it.

    Raises:
        ValueError: If no client has data in the round.
    """
    clients, present = plan.clients, {c: rows for c, rows in plan.train[round].items() if c not in absent}
    if not present:
        gone = f" that has not left, as {', '.join(sorted(absent))} have. Lower `max_epochs`" if absent else ""
        raise ValueError(f"Expected at least one client with data in round {round} but none has any{gone}.")
    number = round_half_up(participation * len(clients)) if isinstance(participation, float) else participation
    rng = np.random.default_rng(seed_of(seed, "participation", round))
    chosen = set(rng.permutation(len(clients))[: max(1, number)].tolist())
    training = [client for i, client in enumerate(clients) if i in chosen and client in present]
    skipped = [c for i, c in enumerate(clients) if i in chosen and c not in present and c not in absent]
    if not training:
        training = [sorted(present)[int(rng.integers(len(present)))]]
    return training, skipped


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


class RoundLoader:
    """The batches of the current round, client after client or cohort after cohort.

    Iterating yields plain batches, as a LightningModule's `training_step` expects them; the `BatchContext` of each
    waits in ``slots``. The number of batches is not known beforehand: it changes from round to round.

    Args:
        stream: Where the data is.
        current_round: Tells the round.
        participation: Share or number of clients per round.
        absent: Tells which clients are gone.
        local_epochs: Tells a client's passes over its data in the round.
        seed: Seed of participation and orders.
        cohort_size: Number of clients side by side.
        stacked: Whether batches have a first dimension for the clients, even if it is one client.
        rehearsed: Tells a client's remembered samples ``[x, y]``, or nothing.
    """

    def __init__(
        self,
        stream: FederatedStream,
        current_round: Callable[[], int],
        participation: float | int,
        absent: Callable[[], Collection[str]],
        local_epochs: Callable[[ClientRound], int],
        seed: int,
        cohort_size: int,
        stacked: bool,
        rehearsed: Callable[[ClientRound], list[Tensor]],
    ) -> None:
        self.stream = stream
        self.current_round = current_round
        self.participation = participation
        self.absent = absent
        self.local_epochs = local_epochs
        self.seed = seed
        self.cohort_size = cohort_size
        self.stacked = stacked
        self.rehearsed = rehearsed
        self.slots: deque[BatchContext] = deque()
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.slots.clear()
        round, size = self.current_round(), self.cohort_size
        if round >= self.stream.plan.rounds:
            return  # a finished fit that is continued: the Trainer looks for a batch before it sees that it is done
        names, self.skipped = participants(self.stream.plan, round, self.participation, self.seed, self.absent())
        client_rounds = [self.stream.client_round(client, round) for client in names]
        if size > 1:  # like lengths together, so that little is padded and few wait for others
            client_rounds.sort(key=lambda client_round: -client_round.samples)
        for start in range(0, len(client_rounds), size):
            yield from self._together(client_rounds[start : start + size], start + size >= len(client_rounds))

    def _together(self, client_rounds: list[ClientRound], last_group: bool) -> Iterator[Any]:
        drawn = zip(client_rounds, self._data(client_rounds), strict=True)
        parts = sorted((self._part(client_round, data) for client_round, data in drawn), key=lambda part: -len(part[3]))
        client_rounds, data, pools, plans = (list(column) for column in zip(*parts, strict=True))
        steps = len(plans[0])
        sequence: Iterator[tuple[Any, int, Tensor | None]]
        if self.stacked:
            sequence = iter(cohort_batches(pools, plans))
        else:
            sequence = ((batch, 1, None) for batch in batches(pools[0], plans[0]))
        epochs = self.local_epochs(client_rounds[0])
        for step, (batch, active, weight) in enumerate(sequence):
            last, epoch = step == steps - 1, step * epochs // steps
            self.slots.append(
                BatchContext(
                    tuple(client_rounds), tuple(data), step == 0, last, last and last_group, active, weight, epoch
                )
            )
            yield batch

    def _data(self, client_rounds: Sequence[ClientRound]) -> list[Any]:
        """Each client's samples of this round."""
        indices = [self.stream.plan.train[client_round.round][client_round.client] for client_round in client_rounds]
        if not self.stream.draws:
            x, y = self.stream.take(np.concatenate(indices))
            sizes = [len(rows) for rows in indices]
            return [list(pair) for pair in zip(x.split(sizes), y.split(sizes), strict=True)]
        # The samples are drawn ahead of the training, but must not depend on who trains before.
        data = []
        for client_round, rows in zip(client_rounds, indices, strict=True):
            with isolate_rng():
                start_randomness(self.seed, client_round.client, client_round.round, "data")
                data.append(self.stream.take(rows))
        return data

    def _part(self, client_round: ClientRound, data: Any) -> tuple[ClientRound, Any, Any, list[Tensor]]:
        extra = self.rehearsed(client_round)
        pool = [torch.cat(pair) for pair in zip(data, extra, strict=True)] if extra else data
        generator = torch.Generator().manual_seed(
            seed_of(self.seed, client_round.client, client_round.round, "batches")
        )
        options = (client_round.samples, self.stream.batch_size, self.local_epochs(client_round), self.stream.shuffle)
        remembered = len(extra[1]) if extra else 0
        client_round = replace(client_round, rehearsed=remembered)
        return client_round, data, pool, plan_batches(*options, generator, remembered, self.stream.drop_last)


def fingerprint(plan: Plan) -> str:
    """A short name of a plan: the same plan has the same one, on every machine."""
    digest = hashlib.sha256()
    for current in plan.train:
        for client, indices in current.items():
            digest.update(client.encode())
            digest.update(indices.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
