"""The rounds of a federation: who takes part, and which batches they train on, in order."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fcl.data.batches import (
    ClientData,
    Request,
    batches,
    cohort_batches,
    joined,
    number_of,
    orders,
    plan_batches,
    read,
)
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import IntArray, Plan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.participation import Participation


@dataclass(frozen=True)
class BatchContext:
    """One batch's place in a round.

    Args:
        client_rounds: The clients that train on it, side by side.
        data: The samples of each of these clients in this round, without rehearsed ones.
        first: Whether it is the first batch of these clients' local training.
        last: Whether it is the last one.
        last_of_round: Whether the round ends with it.
        active: Number of clients, from the front, that still train in this step.
        weight: Share of each sample in its client's mean, shape (clients, batch); None for a client on its own.
        epoch: Local epoch, from 0; of several clients, that of the one with most steps.
    """

    client_rounds: tuple[ClientRound, ...]
    data: tuple[ClientData, ...]
    first: bool
    last: bool
    last_of_round: bool
    active: int = 1
    weight: Tensor | None = None
    epoch: int = 0


class RoundLoader:
    """The batches of the current round, client after client or cohort after cohort.

    Iterating yields plain batches, as a LightningModule's `training_step` expects them; the `BatchContext` of each
    waits in ``slots``. The number of batches is not known beforehand: it changes from round to round.

    Args:
        stream: Where the data is.
        current_round: Tells the round.
        participation: Who takes part.
        local_epochs: Tells a client's passes over its data in the round.
        seed: Seed of participation and orders.
        cohort_size: Number of clients side by side.
        stacked: Whether batches have a first dimension for the clients, even if it is one client.
        rehearsed: Tells a client's remembered samples, nested as its batches are, or nothing.
    """

    def __init__(
        self,
        stream: FederatedStream,
        current_round: Callable[[], int],
        participation: Participation,
        local_epochs: Callable[[ClientRound], int],
        seed: int,
        cohort_size: int,
        stacked: bool,
        rehearsed: Callable[[ClientRound], Any],
    ) -> None:
        self.stream = stream
        self.current_round = current_round
        self.participation = participation
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
        names, self.skipped = self.participation.draw(self.stream.plan, round)
        client_rounds = [self.stream.client_round(client, round) for client in names]
        if size > 1:  # like lengths together, so that little is padded and few wait for others
            client_rounds.sort(key=lambda client_round: -client_round.samples)
        groups = [client_rounds[start : start + size] for start in range(0, len(client_rounds), size)]
        sequence = self._read(groups) if self.stream.draws else self._in_memory(groups)
        for number, group, step, batch, active, weight in sequence:
            last = step == len(group[0].plan) - 1
            self.slots.append(
                BatchContext(
                    tuple(part.client_round for part in group),
                    tuple(part.data for part in group),
                    step == 0,
                    last,
                    last and number == len(groups) - 1,
                    active,
                    weight,
                    group[0].epoch(step),
                )
            )
            yield batch

    def _in_memory(self, groups: Sequence[Sequence[ClientRound]]) -> Iterator[_Step]:
        """The steps of a round whose samples are in memory, all of a group's taken at once."""
        for number, client_rounds in enumerate(groups):
            indices = [self._rows(client_round) for client_round in client_rounds]
            x, y = self.stream.take(np.concatenate(indices))
            sizes = [len(rows) for rows in indices]
            pairs = [list(pair) for pair in zip(x.split(sizes), y.split(sizes), strict=True)]
            data = [ClientData(partial(list, pair)) for pair in pairs]
            group = self._longest_first([self._part(*own) for own in zip(client_rounds, data, strict=True)])
            pools = [joined([part.data.samples(), part.extra]) if part.extra else part.data.samples() for part in group]
            plans = [part.plan for part in group]
            if self.stacked:
                for step, (batch, active, weight) in enumerate(cohort_batches(pools, plans)):
                    yield number, group, step, batch, active, weight
            else:
                for step, batch in enumerate(batches(pools[0], plans[0])):
                    yield number, group, step, batch, 1, None

    def _read(self, groups: Sequence[Sequence[ClientRound]]) -> Iterator[_Step]:
        """The steps of a round whose samples are read batch by batch, perhaps by workers, some ahead."""
        planned: deque[list[_Part]] = deque()

        def requests() -> Iterator[Request]:
            for client_rounds in groups:
                group = self._longest_first([self._part(one, self._later(one)) for one in client_rounds])
                planned.append(group)
                for step in range(len(group[0].plan)):
                    yield from (self._request(part, step) for part in group if step < len(part.plan))

        samples = read(self.stream.take, requests(), self.stream.num_workers)
        for number in range(len(groups)):
            first = next(samples)  # plans its group
            group, samples = planned.popleft(), itertools.chain([first], samples)
            for step in range(len(group[0].plan)):
                training = [part for part in group if step < len(part.plan)]
                own = [part.mixed(next(samples), step) for part in training]
                if not self.stacked:
                    yield number, group, step, own[0], 1, None
                    continue
                done = len(group) - len(own)
                padded = [*own, *(own[:1] * done)]
                batch, _, weight = next(cohort_batches(padded, [[torch.arange(len(y))] for _, y in padded]))
                weight[len(own) :] = 0
                yield number, group, step, batch, len(own), weight

    def _rows(self, client_round: ClientRound) -> IntArray:
        return self.stream.plan.train[client_round.round][client_round.client]

    def _later(self, client_round: ClientRound) -> ClientData:
        """A client's samples, read when they are asked for."""
        request = Request.of(self._rows(client_round), self.seed, client_round.client, client_round.round)
        return ClientData(lambda: request.read(self.stream.take))

    def _request(self, part: _Part, step: int) -> Request:
        one = part.client_round
        rows = self._rows(one)[part.own(step).numpy()]
        return Request.of(rows, self.seed, one.client, one.round, part.epoch(step), step)

    def _longest_first(self, group: list[_Part]) -> list[_Part]:
        return sorted(group, key=lambda part: -len(part.plan))

    def _part(self, client_round: ClientRound, data: ClientData) -> _Part:
        extra, stream = self.rehearsed(client_round), self.stream
        remembered, epochs = number_of(extra), self.local_epochs(client_round)
        generator = orders(self.seed, client_round.client, client_round.round)
        options = (client_round.samples, stream.batch_size, epochs, stream.shuffle, generator, remembered)
        plan = plan_batches(*options, stream.drop_last)
        return _Part(replace(client_round, rehearsed=remembered), data, extra, epochs, plan)


@dataclass(frozen=True)
class _Part:
    """A client's local training in a round: its samples, the remembered ones behind them, and its batches."""

    client_round: ClientRound
    data: ClientData
    extra: Any
    epochs: int
    plan: Sequence[Tensor]

    def epoch(self, step: int) -> int:
        """The local epoch that a batch belongs to."""
        return step * self.epochs // len(self.plan)

    def own(self, step: int) -> Tensor:
        """Which of the round's samples make up a batch, without the remembered ones."""
        rows = self.plan[step]
        return rows[rows < self.client_round.samples]

    def mixed(self, batch: Any, step: int) -> Any:
        """A batch and the remembered samples that join it."""
        chosen = self.plan[step][len(self.own(step)) :] - self.client_round.samples
        return joined([batch, next(batches(self.extra, [chosen]))]) if len(chosen) else batch


# Number of a group, its clients, the step, its batch, how many of the clients still train, and the samples' shares.
_Step: TypeAlias = tuple[int, list[_Part], int, Any, int, Tensor | None]


def fingerprint(plan: Plan) -> str:
    """A short name of a plan: the same plan has the same one, on every machine."""
    digest = hashlib.sha256()
    for current in plan.train:
        for client, indices in current.items():
            digest.update(client.encode())
            digest.update(indices.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
