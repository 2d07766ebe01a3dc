"""The rounds of a federation: who takes part, and which batches they train on, in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fcl.data.batches import Batch, Request, batches, joined, number_of
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.orders import Batching, order_keys, plan_cohort
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.participation import Participation
from lightning_fcl.simulation.placement import Placement


@dataclass(frozen=True)
class BatchContext:
    """One batch's place in a round.

    Args:
        client_rounds: The clients that train on it, side by side.
        samples: Tells the samples of one of these clients in this round, by number, without rehearsed ones.
        first: Whether it is the first batch of these clients' local training.
        last: Whether it is the last one.
        last_of_round: Whether the round ends with it.
        active: Number of clients, from the front, that still train in this step.
        weight: Share of each sample in its client's mean, shape (clients, batch); None for a client on its own.
        epoch: Local epoch, from 0; of several clients, that of the one with most steps.
        step: The batch's number within their local training, from 0.
    """

    client_rounds: ClientRounds
    samples: Callable[[int], Any]
    first: bool
    last: bool
    last_of_round: bool
    active: int = 1
    weight: Tensor | None = None
    epoch: int = 0
    step: int = 0


class RoundLoader:
    """The batches of the current round, client after client or cohort after cohort.

    Iterating yields plain batches, as a LightningModule's `training_step` expects them; the `BatchContext` of each
    waits in ``contexts``. The number of batches is not known beforehand: it changes from round to round.

    Args:
        stream: Where the data is.
        current_round: Tells the round.
        participation: Who takes part.
        epochs: A client's passes over its data in the round: a number for all, or a function that tells it.
        rehearsed: Tells a client's remembered samples, nested as its batches are, or nothing; None: no client has any.
        seed: Seed of participation and orders.
        cohort_size: Number of clients side by side.
        stacked: Whether batches have a first dimension for the clients, even if it is one client.
        placement: Which of the cohorts are this process's. Where it has none in a round, its only batch is None.
    """

    def __init__(
        self,
        stream: FederatedStream,
        current_round: Callable[[], int],
        participation: Participation,
        epochs: int | Callable[[ClientRound], int],
        rehearsed: Callable[[ClientRound], Any] | None,
        seed: int,
        cohort_size: int,
        stacked: bool,
        placement: Placement,
    ) -> None:
        self.stream = stream
        self.batching = Batching(stream.batch_size, stream.shuffle, stream.drop_last)
        self.current_round = current_round
        self.participation = participation
        self.epochs = epochs
        self.rehearsed = rehearsed
        self.seed = seed
        self.cohort_size = cohort_size
        self.stacked = stacked
        self.placement = placement
        self.contexts: deque[BatchContext] = deque()
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.contexts.clear()
        round, size, plan = self.current_round(), self.cohort_size, self.stream.plan
        if round >= plan.rounds:
            return  # a finished fit that is continued: the Trainer looks for a batch before it sees that it is done
        names, self.skipped = self.participation.draw(plan, round)
        if size > 1:  # like lengths together, so that little is padded and few wait for others
            most_first = np.argsort([-len(plan.train[round][client]) for client in names], kind="stable")
            names = [names[i] for i in most_first]
        cohorts = [names[start : start + size] for start in range(0, len(names), size)]
        if self.placement.ranks.number > 1:
            samples_of = {client: len(plan.train[round][client]) for client in names}
            cohorts = [cohorts[number] for number in self.placement.place(cohorts, samples_of)]
        if not cohorts:
            yield None
        sequence = self._read(cohorts, round) if self.stream.draws else self._in_memory(cohorts, round)
        for number, work, samples, step, batch, weight in sequence:
            last = step == work.steps - 1
            self.contexts.append(
                BatchContext(
                    work.parts,
                    samples,
                    step == 0,
                    last,
                    last and number == len(cohorts) - 1,
                    work.active(step),
                    weight,
                    work.epoch(0, step),
                    step,
                )
            )
            yield batch

    def cohorts(self, round: int) -> int:
        """How many cohorts a round has."""
        return -(-len(self.participation.draw(self.stream.plan, round)[0]) // self.cohort_size)

    def _planned(self, names: Sequence[str], round: int) -> _CohortWork:
        """The local training of some clients, those with most batches first."""
        stream, parts = self.stream, self.stream.client_rounds(names, round)
        if isinstance(self.epochs, int):
            epochs = np.full(len(names), self.epochs)
        else:
            epochs = np.array([self.epochs(part) for part in parts])
        extra: list[Any] = [[]] * len(names) if self.rehearsed is None else [self.rehearsed(part) for part in parts]
        remembered = None if self.rehearsed is None else np.array([number_of(samples) for samples in extra])
        keys = order_keys(self.seed, names, round)
        index, lengths = plan_cohort(parts.samples, epochs, self.batching, keys, remembered)
        steps = np.count_nonzero(lengths, axis=1)
        if remembered is not None or (steps[1:] > steps[:-1]).any():
            order = np.argsort(-steps, kind="stable")
            names, extra = [names[i] for i in order], [extra[i] for i in order]
            epochs, index, lengths = epochs[order], index[order], lengths[order]
            parts = stream.client_rounds(names, round, None if remembered is None else remembered[order])
        rows = [stream.plan.train[round][client] for client in names]
        return _CohortWork(parts, rows, extra, epochs, index, lengths)

    def _in_memory(self, cohorts: Sequence[Sequence[str]], round: int) -> Iterator[_Step]:
        """The steps of a round whose samples are in memory, all of a cohort's taken at once."""
        for number, names in enumerate(cohorts):
            work = self._planned(names, round)
            rows, places, shares = np.concatenate(work.rows), work.places(), torch.from_numpy(work.shares())
            take: Callable[[IntArray], Any] = partial(_rows_of, self.stream, rows)
            seen_again = work.epochs.max() > 1 and self.stream.samples.scale is None  # stored pixels take less room
            if work.remembers or seen_again:
                pool = joined([self.stream.take(rows), *filter(number_of, work.extra)])
                take = partial(_places_in, pool)
            samples = partial(_own_samples, self.stream, work.rows)
            for step, width in enumerate(work.lengths.max(axis=0).tolist()):
                batch = take(places[:, step, :width] if self.stacked else places[0, step, :width])
                yield number, work, samples, step, batch, shares[:, step, :width] if self.stacked else None

    def _read(self, cohorts: Sequence[Sequence[str]], round: int) -> Iterator[_Step]:
        """The steps of a round whose samples are read batch by batch, perhaps by workers, some ahead."""
        planned: deque[_CohortWork] = deque()

        def requests() -> Iterator[Request]:
            for names in cohorts:
                work = self._planned(names, round)
                planned.append(work)
                for step in range(work.steps):
                    for row in range(work.active(step)):
                        rows = work.rows[row][work.own(row, step)]
                        yield Request.of(rows, self.seed, work.parts.clients[row], round, work.epoch(row, step), step)

        arriving = self.stream.read(requests())
        for number in range(len(cohorts)):
            first = next(arriving)  # plans its cohort
            work, arriving = planned.popleft(), itertools.chain([first], arriving)
            whole = [
                Request.of(rows, self.seed, client, round)
                for rows, client in zip(work.rows, work.parts.clients, strict=True)
            ]
            samples = partial(_read_once, [cache(partial(one.read, self.stream.take)) for one in whole])
            shares = torch.from_numpy(work.shares())
            for step in range(work.steps):
                batches_of = [work.mixed(next(arriving), row, step) for row in range(work.active(step))]
                if not self.stacked:
                    yield number, work, samples, step, batches_of[0], None
                    continue
                idle = [[part[:0] for part in batches_of[0]]] * (len(whole) - len(batches_of))
                columns = zip(*batches_of, *idle, strict=True)
                batch = [pad_sequence(list(column), batch_first=True) for column in columns]
                yield number, work, samples, step, batch, shares[:, step, : batch[1].shape[1]]


@dataclass(frozen=True)
class _CohortWork:
    """The local training of some clients in a round: their samples, the remembered ones behind them, their batches."""

    parts: ClientRounds
    rows: Sequence[IntArray]
    extra: Sequence[Any]
    epochs: IntArray
    index: IntArray  # (clients, steps, batch), as `plan_cohort` gives it
    lengths: IntArray  # (clients, steps)

    @property
    def steps(self) -> int:
        """The batches of the client that has most."""
        return int(self.index.shape[1])

    @property
    def remembers(self) -> bool:
        """Whether remembered samples join any batch."""
        return self.parts.rehearsed is not None and bool(self.parts.rehearsed.any())

    def active(self, step: int) -> int:
        """How many clients, from the front, still train."""
        return int(np.count_nonzero(self.lengths[:, step]))

    def epoch(self, row: int, step: int) -> int:
        """The local epoch that a client's batch belongs to."""
        return int(step * self.epochs[row] // np.count_nonzero(self.lengths[row]))

    def places(self) -> IntArray:
        """Where the samples are that make up the batches: all clients' own in a row, the remembered ones behind."""
        sizes = self.parts.samples
        places = self.index + (sizes.cumsum() - sizes)[:, None, None]
        if not self.remembers:
            return places
        counts = self.parts.trained - sizes
        behind = sizes.sum() + counts.cumsum() - counts - sizes
        return np.where(self.index < sizes[:, None, None], places, self.index + behind[:, None, None])

    def shares(self) -> NDArray[np.float32]:
        """The share of each sample in its client's mean, shape (clients, steps, batch), 0 for padding."""
        real = np.arange(self.index.shape[2]) < self.lengths[:, :, None]
        return (real / np.maximum(self.lengths, 1)[:, :, None]).astype(np.float32)

    def _chosen(self, row: int, step: int) -> IntArray:
        chosen: IntArray = self.index[row, step, : self.lengths[row, step]]
        return chosen

    def own(self, row: int, step: int) -> IntArray:
        """Which of the round's samples make up a client's batch, without the remembered ones."""
        chosen = self._chosen(row, step)
        own: IntArray = chosen[chosen < self.parts.samples[row]]
        return own

    def mixed(self, batch: Batch, row: int, step: int) -> Any:
        """A client's batch and the remembered samples that join it."""
        chosen = self._chosen(row, step)
        joining = torch.from_numpy(chosen[chosen >= self.parts.samples[row]] - self.parts.samples[row])
        return joined([batch, next(batches(self.extra[row], [joining]))]) if len(joining) else batch


# Number of a cohort, its work, a client's samples by number, the step, its batch, and the samples' shares.
_Step: TypeAlias = tuple[int, _CohortWork, Callable[[int], Any], int, Any, Tensor | None]


def _rows_of(stream: FederatedStream, rows: IntArray, places: IntArray) -> Any:
    return stream.take(rows[places])


def _places_in(pool: Any, places: IntArray) -> Any:
    return next(batches(pool, [torch.from_numpy(places)]))


def _own_samples(stream: FederatedStream, rows: Sequence[IntArray], row: int) -> Any:
    return stream.take(rows[row])


def _read_once(readers: Sequence[Callable[[], Any]], row: int) -> Any:
    return readers[row]()
