"""The training data of a stream as Lightning asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightning_fcl.data.batches import Request, batches
from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.orders import Batching, order_keys, plan_batches

if TYPE_CHECKING:
    from lightning_fcl.data.stream import FederatedStream


class ClientLoader:
    """The training data of all clients, which a `FederatedStrategy` replaces by the batches of each round.

    In a plain Trainer a stream of one client can be iterated as it is: an epoch is a round.
    """

    def __init__(self, stream: FederatedStream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        if self.stream.count_batches is None:
            raise TypeError(
                'Expected a Trainer with `strategy="federated"` that fits where the number of batches is asked for, '
                "which is a client's in a round, but there is none."
            )
        return self.stream.count_batches()

    def __iter__(self) -> Iterator[Any]:
        stream, trainer = self.stream, self.stream.trainer
        clients = stream.plan.clients
        if len(clients) != 1 or trainer is None:
            raise ValueError(
                f'Expected a Trainer with `strategy="federated"` for a stream of {len(clients)} clients but got a '
                "plain one, which trains a single client."
            )
        client, round = clients[0], current_round(trainer)
        if round >= stream.plan.rounds and trainer.max_epochs == stream.plan.rounds:
            return  # a finished fit that is continued: the Trainer looks for a batch before it sees that it is done
        if round >= stream.plan.rounds:
            raise ValueError(
                f"Expected `max_epochs` to be at most the stream's {stream.plan.rounds} rounds but got "
                f"{trainer.max_epochs}."
            )
        rows = stream.plan.train[round][client]
        batching = Batching(stream.batch_size, stream.shuffle, stream.drop_last)
        plan = plan_batches(len(rows), 1, batching, order_keys(stream.seed, [client], round))
        if not stream.samples.draws:
            yield from batches(stream.take(rows), [torch.from_numpy(chosen) for chosen in plan])
            return
        requests = (Request.of(rows[chosen], stream.seed, client, round, 0, step) for step, chosen in enumerate(plan))
        yield from stream.read(requests)
