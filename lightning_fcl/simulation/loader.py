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
from torch import Tensor

from lightning_fcl.data.batches import ClientData, batches, cohort_batches, plan_batches
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.scenarios import Plan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.participation import participants
from lightning_fcl.randomness import seed_of, start_randomness


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

    def _data(self, client_rounds: Sequence[ClientRound]) -> list[ClientData]:
        """Each client's samples of this round."""
        indices = [self.stream.plan.train[client_round.round][client_round.client] for client_round in client_rounds]
        if not self.stream.draws:
            x, y = self.stream.take(np.concatenate(indices))
            sizes = [len(rows) for rows in indices]
            pairs = [list(pair) for pair in zip(x.split(sizes), y.split(sizes), strict=True)]
            return [ClientData(lambda pair=pair: pair) for pair in pairs]  # type: ignore[misc]
        # The samples are drawn ahead of the training, but must not depend on who trains before.
        data = []
        for client_round, rows in zip(client_rounds, indices, strict=True):
            with isolate_rng():
                start_randomness(self.seed, client_round.client, client_round.round, "data")
                samples = self.stream.take(rows)
            data.append(ClientData(lambda samples=samples: samples))  # type: ignore[misc]
        return data

    def _part(self, client_round: ClientRound, data: ClientData) -> tuple[ClientRound, ClientData, Any, list[Tensor]]:
        extra = self.rehearsed(client_round)
        pool = [torch.cat(pair) for pair in zip(data.samples(), extra, strict=True)] if extra else data.samples()
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
