"""The clients of a round that train side by side, often a single one, and the batches that they train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fcl.data.batches import Alike, Batch, Request, alike, batches, joined, number_of
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.orders import order_keys, plan_cohort
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.local.own_step import StepTrainer
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.compose import epochs_of, rehearsed_by
from lightning_fcl.methods.declaration import Declaration, client_of

if TYPE_CHECKING:
    from lightning_fcl.simulation.federation import Federation


class Cohort:
    """Some clients of a round that train side by side, and their batches, those with most batches first.

    Args:
        federation: The federation.
        names: The clients.
        round: The round.
    """

    def __init__(self, federation: Federation, names: Sequence[str], round: int) -> None:
        self._stream = stream = federation.stream
        self._seed, self._module = federation.seed, federation.module
        self._every = federation.strategy.local_steps.every  # batches a step
        # Batches of modules' own steps are stacked and never padded: lists of `Alike`.
        self._stacked, self._alike = federation.trainer.stacked, isinstance(federation.trainer, StepTrainer)
        self._rehearsed = rehearsed_by(federation.methods, federation.client_before)
        epochs_in = epochs_of(federation.methods, federation.client_before, federation.strategy.local_epochs)
        samples = np.array([len(stream.plan.train[round][name]) for name in names], dtype=np.int64)
        part_of = partial(stream.client_round, round=round)
        parts = ClientRounds(round, names, samples, part_of)
        if isinstance(epochs_in, int):
            epochs = np.full(len(names), epochs_in)
        else:
            epochs = np.array([epochs_in(part) for part in parts])
        remembered = None if self._rehearsed is None else np.array([number_of(self._rehearsed(part)) for part in parts])
        batching = federation.strategy.limits.batching(stream)
        keys = order_keys(self._seed, names, round)
        index, lengths = plan_cohort(parts.samples, epochs, batching, keys, remembered)
        steps = np.count_nonzero(lengths, axis=1)
        if remembered is not None or (steps[1:] > steps[:-1]).any():
            order = np.argsort(-steps, kind="stable")
            names, epochs, index, lengths = [names[i] for i in order], epochs[order], index[order], lengths[order]
            rehearsed = None if remembered is None else remembered[order]
            parts = ClientRounds(round, names, samples[order], part_of, rehearsed)
        self.clients = parts
        self.received: Sequence[State] = ()  # what each has received at the start of the round
        self.step = 0  # of the batch at hand
        self.weight: Tensor | None = None  # the share of each of its samples in its client's mean, (clients, batch)
        self._rows = [stream.plan.train[round][client] for client in names]
        self._epochs = epochs
        self._per_epoch = batching.per_epoch(parts.samples)
        self._index: IntArray = index  # (clients, steps, batch), as `plan_cohort` gives it
        self._lengths: IntArray = lengths  # (clients, steps)
        self._read: dict[int, Any] = {}

    def __len__(self) -> int:
        """The batches of the client that has most."""
        return int(self._index.shape[1])

    @property
    def client_round(self) -> ClientRound | None:
        """The only client; None where several may train side by side."""
        return None if self._stacked else self.clients[0]

    @property
    def last_batch(self) -> bool:
        """Whether the batch at hand is the last one."""
        return self.step == len(self) - 1

    @property
    def local_epoch(self) -> int:
        """The local epoch, from 0, of the batch at hand; of several clients, that of the one with most batches."""
        return self._epoch(0, self.step)

    @property
    def active(self) -> int:
        """How many clients, from the front, train on the batch at hand."""
        return self._active(self.step)

    def samples(self, row: int) -> Any:
        """The samples of one of the clients, by its number, without the remembered ones."""
        if not self._stream.samples.draws:
            return self._stream.take(self._rows[row])
        if row not in self._read:
            client, round = self.clients.clients[row], self.clients.round
            self._read[row] = self._stream.client_samples(client, round, self._seed)
        return self._read[row]

    def data(self, method: Declaration, row: int) -> Any:
        """The samples of one of the clients, for a method that looks at them."""
        return self.samples(row) if method.needs.samples else None

    def ended(self, method: Declaration, row: int, memory: Memory) -> Client:
        """One of the clients after its local training, as a method sees it."""
        client = client_of(method, self._module, memory, self.received[row], self.clients[row])
        batches = int(np.count_nonzero(self._lengths[row]))
        client.steps = -(-batches // self._every)
        return client

    def requests(self) -> Iterator[Request]:
        """What is to be read for the batches, one client's after the other's."""
        for step in range(len(self)):
            for row in range(self._active(step)):
                chosen = self._chosen(row, step)
                rows = self._rows[row][chosen[chosen < self.clients.samples[row]]]
                place = self._epoch(row, step), step
                yield Request.of(rows, self._seed, self.clients.clients[row], self.clients.round, *place)

    def batches(self, read: Iterator[Any] | None) -> Iterator[Any]:
        """The batches in order.

        Args:
            read: What comes for `requests`; None: samples are taken from memory, all at once.
        """
        extra = [[]] * len(self._rows) if self._rehearsed is None else [self._rehearsed(part) for part in self.clients]
        shares = torch.from_numpy(self._shares())
        taken = self._taken(extra) if read is None else self._arriving(read, extra)
        for self.step, batch in enumerate(taken):
            padded = self._stacked and not self._alike
            self.weight = shares[:, self.step, : self._width(self.step)] if padded else None
            yield batch

    def _taken(self, extra: Sequence[Any]) -> Iterator[Any]:
        """Batches of samples in memory."""
        rows, places = np.concatenate(self._rows), self._places()
        rehearsed, pool = self.clients.rehearsed, None
        seen_again = self._epochs.max() > 1 and self._stream.samples.scale is None  # stored pixels take less room
        if seen_again or (rehearsed is not None and rehearsed.any()):
            pool = joined([self._stream.take(rows), *filter(number_of, extra)])

        def take(chosen: IntArray) -> Any:
            return self._stream.take(rows[chosen]) if pool is None else next(batches(pool, [torch.from_numpy(chosen)]))

        for step in range(len(self)):
            if self._alike:
                lengths = self._lengths[:, step]
                groups = [(np.flatnonzero(lengths == length), length) for length in np.unique(lengths[lengths > 0])]
                yield [Alike(torch.from_numpy(own), take(places[own, step, :length])) for own, length in groups]
            else:
                yield take(places[slice(None) if self._stacked else 0, step, : self._width(step)])

    def _arriving(self, read: Iterator[Any], extra: Sequence[Any]) -> Iterator[Any]:
        """Batches that are read one by one, perhaps by workers, some ahead."""
        for step in range(len(self)):
            each = [self._mixed(next(read), extra[row], row, step) for row in range(self._active(step))]
            if self._alike or not self._stacked:
                yield alike(each) if self._alike else each[0]
                continue
            idle = [[part[:0] for part in each[0]]] * (len(self._rows) - len(each))
            yield [pad_sequence(list(column), batch_first=True) for column in zip(*each, *idle, strict=True)]

    def _mixed(self, batch: Batch, extra: Any, row: int, step: int) -> Any:
        """A client's batch and the remembered samples that join it."""
        chosen, own = self._chosen(row, step), self.clients.samples[row]
        joining = torch.from_numpy(chosen[chosen >= own] - own)
        return joined([batch, next(batches(extra, [joining]))]) if len(joining) else batch

    def _chosen(self, row: int, step: int) -> IntArray:
        chosen: IntArray = self._index[row, step, : self._lengths[row, step]]
        return chosen

    def _active(self, step: int) -> int:
        return int(np.count_nonzero(self._lengths[:, step]))

    def _width(self, step: int) -> int:
        return int(self._lengths[:, step].max())

    def _epoch(self, row: int, step: int) -> int:
        return int(step // self._per_epoch[row])

    def _places(self) -> IntArray:
        """Where the samples are that make up the batches: all clients' own in a row, the remembered ones behind."""
        sizes, counts = self.clients.samples, self.clients.trained - self.clients.samples
        own = self._index + (sizes.cumsum() - sizes)[:, None, None]
        behind = sizes.sum() + counts.cumsum() - counts - sizes
        return np.where(self._index < sizes[:, None, None], own, self._index + behind[:, None, None])

    def _shares(self) -> NDArray[np.float32]:
        """The share of each sample in its client's mean, shape (clients, steps, batch), 0 for padding."""
        real = np.arange(self._index.shape[2]) < self._lengths[:, :, None]
        return (real / np.maximum(self._lengths, 1)[:, :, None]).astype(np.float32)
