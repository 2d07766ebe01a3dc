"""The clients of a round that train at the same time (a single client in sequential training), and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fcl.data.batching import Batch, BatchRequest, index_nested
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.data.collation import ShapeGroup, concat_nested, group_by_shape
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.scenarios import IntArray
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import ClientState
from lightning_fcl.federation.local_trainer import LocalResult, LocalTrainer
from lightning_fcl.federation.protocols import FederationProtocol
from lightning_fcl.federation.record import ClientLoss
from lightning_fcl.local_training.vmap_training_step import StepTrainer
from lightning_fcl.methods.method_round import LocalRound
from lightning_fcl.methods.replay_samples import JoiningSamples, write_samples
from lightning_fcl.simulation.client_losses import client_losses


class ClientGroup:
    """Clients of a round that train at the same time, and their batches.

    The clients are sorted by their number of batches, largest first. In sequential training a group has one client.

    Args:
        federation: The federation.
        local_trainer: The object that trains the clients.
        batches_per_step: Number of batches per optimizer step.
        clients: The clients.
        replayed: Function that returns the replay samples that are added to a client's batches. None: no method has
            replay samples.
        local_epochs: Each client's number of local epochs, shape (clients,).
        batches_per_epoch: Each client's number of batches per local epoch, shape (clients,).
        index: Indices of the samples in each batch, shape (clients, steps, batch), from `plan_group_batches`. A
            client's own samples have the first indices, and its replay samples have the indices after them.
        sample_lengths: Number of samples in each batch, shape (clients, steps).
    """

    def __init__(
        self,
        federation: FederationProtocol,
        local_trainer: LocalTrainer,
        batches_per_step: int,
        clients: ClientRounds,
        replayed: Callable[[ClientRound], JoiningSamples] | None,
        local_epochs: IntArray,
        batches_per_epoch: IntArray,
        index: IntArray,
        sample_lengths: IntArray,
    ) -> None:
        self._stream = federation.stream
        self._seed = federation.seed
        self._every = batches_per_step
        # In each step, a `StepTrainer` gets a list with a `ShapeGroup` for each shape of batch. Batches are not padded.
        self._stacked, self._alike = local_trainer.is_stacked, isinstance(local_trainer, StepTrainer)
        self.clients = clients
        self.received: Sequence[State] = ()  # the state that each client downloaded at the start of the round
        self.kept: Sequence[ClientState] = ()  # each client's state before the round
        self.entered: Sequence[ClientState] = ()  # each client's state after `enter_round`
        self.step = 0  # number of the current batch
        self.computed_steps: list[int] = []  # number of the batch for each call of `training_step`
        self.weight: Tensor | None = None  # weight of each sample in its client's mean loss, shape (active, batch)
        self._rows = [self._stream.plan.train[clients.round_idx][client] for client in clients.client_ids]
        self._replayed, self._epochs, self._per_epoch = replayed, local_epochs, batches_per_epoch
        self._index, self._lengths = index, sample_lengths
        self._active: list[int] = np.count_nonzero(sample_lengths, axis=0).tolist()  # clients with a batch in each step
        self._widths: list[int] = sample_lengths.max(axis=0).tolist()  # size of the largest batch in each step
        self._read: dict[int, Any] = {}

    def __len__(self) -> int:
        """Number of batches of the client with the most batches."""
        return int(self._index.shape[1])

    @property
    def client_round(self) -> ClientRound | None:
        """The client of a group in sequential training. None if batches are stacked for vectorized training."""
        return None if self._stacked else self.clients[0]

    @property
    def last_batch(self) -> bool:
        """Whether the current batch is the last one of the group."""
        return self.step == len(self) - 1

    @property
    def local_epoch(self) -> int:
        """Local epoch of the current batch, from 0. Vectorized: the epoch of the client with the most batches."""
        return self._epoch(0, self.step)

    @property
    def active(self) -> int:
        """Number of clients with samples in the current batch. These clients are the first clients of the group."""
        return self._active[self.step]

    def client_samples(self, row: int) -> Any:
        """Return the samples of the client with number ``row`` in the group, without replay samples."""
        if not self._stream.samples.is_random:
            return self._stream.get_samples(self._rows[row])
        if row not in self._read:
            client, round_idx = self.clients.client_ids[row], self.clients.round_idx
            self._read[row] = self._stream.client_samples(client, round_idx, self._seed)
        return self._read[row]

    def local_round(self, row: int, trained: LocalResult) -> LocalRound:
        """Return the data that methods need about the client with number ``row`` after its local training."""
        return LocalRound(
            self.clients[row],
            self.received[row],
            self.kept[row],
            self.entered[row],
            -(-self.batches_of(row) // self._every),
            trained.trained_state(row),
            trained.method_states[row],
            partial(self.client_samples, row),
        )

    def batches_of(self, row: int) -> int:
        """Return the number of batches of the client with number ``row``."""
        return int(np.count_nonzero(self._lengths[row]))

    def train_losses(self, trained: LocalResult) -> dict[str, ClientLoss]:
        """Return the training loss of each client that trained with a loss."""
        losses_by_step: dict[int, Tensor] = {}
        for step, step_losses in zip(self.computed_steps, trained.step_losses, strict=False):
            # An optimizer such as LBFGS evaluates a batch several times. The first loss is the loss before the step.
            if step_losses is not None:
                losses_by_step.setdefault(step, step_losses)
        losses = client_losses(losses_by_step, self._lengths, self._per_epoch)
        clients = zip(self.clients.client_ids, losses, strict=True)
        return {client: loss for client, loss in clients if loss is not None}

    @property
    def train_samples(self) -> dict[str, int]:
        """Number of samples in the batches of each client, over all local epochs."""
        return dict(zip(self.clients.client_ids, self._lengths.sum(axis=1).tolist(), strict=True))

    def requests(self) -> Iterator[BatchRequest]:
        """Yield the requests for samples, step by step: one request for each client that has a batch in the step."""
        for step in range(len(self)):
            for row in range(self._active[step]):
                sample_indices = self._chosen(row, step)
                rows = self._rows[row][sample_indices[sample_indices < self.clients.num_samples[row]]]
                epoch_and_step = self._epoch(row, step), step
                yield BatchRequest.keyed(
                    rows, self._seed, self.clients.client_ids[row], self.clients.round_idx, *epoch_and_step
                )

    def batches(self, loaded_batches: Iterator[Any] | None) -> Iterator[Any]:
        """Yield the batches of the group in order.

        Args:
            loaded_batches: The batches that answer the `requests`. None: all samples are in memory.
        """
        empty_samples = [JoiningSamples()] * len(self._rows)
        extra = empty_samples if self._replayed is None else [self._replayed(part) for part in self.clients]
        shares = torch.from_numpy(self._shares()) if self._stacked and not self._alike else None
        batch_iterator = (
            self._batches_in_memory(extra) if loaded_batches is None else self._arriving(loaded_batches, extra)
        )
        for self.step, batch in enumerate(batch_iterator):
            self.weight = None if shares is None else shares[: self.active, self.step, : self._widths[self.step]]
            yield batch

    def _batches_in_memory(self, extra: Sequence[JoiningSamples]) -> Iterator[Any]:
        """Yield batches of samples that are in memory."""
        rows, places = np.concatenate(self._rows), self._places()
        rehearsed, pool = self.clients.num_replay_samples, None
        # Samples that are used in several epochs, or together with replay samples, are copied to one pool. Samples
        # stored as pixels are copied only if there are replay samples, because pixels need less memory than the copy.
        seen_again = self._epochs.max() > 1 and self._stream.samples.scale is None
        if seen_again or (rehearsed is not None and rehearsed.any()):
            pool = concat_nested([self._stream.get_samples(rows), *(own.samples for own in extra if len(own))])

        def take(sample_indices: IntArray) -> Any:
            return (
                self._stream.get_samples(rows[sample_indices])
                if pool is None
                else index_nested(pool, torch.from_numpy(sample_indices))
            )

        transforms = self._replayed is not None and any(own.is_transformed for own in extra)
        for step in range(len(self)):
            if self._alike:
                lengths = self._lengths[:, step]
                groups = [(np.flatnonzero(lengths == length), length) for length in np.unique(lengths[lengths > 0])]
                batch = [ShapeGroup(torch.from_numpy(own), take(places[own, step, :length])) for own, length in groups]
            else:
                batch = take(places[slice(self._active[step]) if self._stacked else 0, step, : self._widths[step]])
            if transforms:
                for row, own_batch in self._each(batch, step):
                    self._transform(own_batch, extra[row], row, step)
            yield batch

    def _each(self, batch: Any, step: int) -> Iterator[tuple[int, Any]]:
        """Yield each client's number in the group, and the client's part of a batch. The parts are views."""
        if self._alike:
            parts = ((row, one.batch, at) for one in batch for at, row in enumerate(one.rows.tolist()))
        elif self._stacked:
            parts = ((row, batch, row) for row in range(self._active[step]))
        else:
            yield 0, batch
            return
        yield from ((row, apply_to_collection(stacked, Tensor, itemgetter(at))) for row, stacked, at in parts)

    def _arriving(self, loaded_batches: Iterator[Any], extra: Sequence[JoiningSamples]) -> Iterator[Any]:
        """Yield batches that are read during training, possibly in advance by worker processes."""
        for step in range(len(self)):
            client_batches = [
                self._mixed(next(loaded_batches), extra[row], row, step) for row in range(self._active[step])
            ]
            if self._alike or not self._stacked:
                yield group_by_shape(client_batches) if self._alike else client_batches[0]
                continue
            yield [pad_sequence(list(column), batch_first=True) for column in zip(*client_batches, strict=True)]

    def _mixed(self, batch: Batch, extra: JoiningSamples, row: int, step: int) -> Any:
        """Return a client's batch, followed by the replay samples of this batch.

        If a method has replay samples, all batches are plain tensors, including batches without replay samples.
        """
        if self._replayed is not None:
            batch = plain_samples(batch)
        joining = self._joining(row, step)
        return concat_nested([batch, self._take(extra, joining, row, step)]) if len(joining) else batch

    def _joining(self, row: int, step: int) -> Tensor:
        """Return the indices, within the client's replay samples, of the replay samples in a batch.

        In the batch, replay samples come after the client's own samples.
        """
        sample_indices, num_own_samples = self._chosen(row, step), self.clients.num_samples[row]
        return torch.from_numpy(sample_indices[sample_indices >= num_own_samples] - num_own_samples)

    def _take(self, extra: JoiningSamples, joining: Tensor, row: int, step: int) -> Any:
        return extra.take(joining, self._seed, self.clients.client_ids[row], self.clients.round_idx, step)

    def _transform(self, batch: Any, extra: JoiningSamples, row: int, step: int) -> None:
        """Replace the replay samples in a client's batch by transformed replay samples, in place."""
        if extra.is_transformed and len(joining := self._joining(row, step)):
            length = int(self._lengths[row, step])
            write_samples(batch, torch.arange(length - len(joining), length), self._take(extra, joining, row, step))

    def _chosen(self, row: int, step: int) -> IntArray:
        sample_indices: IntArray = self._index[row, step, : self._lengths[row, step]]
        return sample_indices

    def _epoch(self, row: int, step: int) -> int:
        return int(step // self._per_epoch[row])

    def _places(self) -> IntArray:
        """Return the positions of samples in the pool, shape (clients, steps, batch).

        The pool contains the samples of all clients, and then the replay samples of all clients.
        """
        if len(self.clients) == 1:
            return self._index
        sizes, counts = self.clients.num_samples, self.clients.num_trained_samples - self.clients.num_samples
        own_positions = self._index + (sizes.cumsum() - sizes)[:, None, None]
        replay_offsets = sizes.sum() + counts.cumsum() - counts - sizes
        return np.where(self._index < sizes[:, None, None], own_positions, self._index + replay_offsets[:, None, None])

    def _shares(self) -> NDArray[np.float32]:
        """Return each sample's weight in its client's mean loss, shape (clients, steps, batch), 0 for padding."""
        real = np.arange(self._index.shape[2]) < self._lengths[:, :, None]
        return (real / np.maximum(self._lengths, 1)[:, :, None]).astype(np.float32)
