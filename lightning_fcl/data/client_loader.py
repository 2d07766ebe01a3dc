"""The loader of a stream's training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_fcl.data.batching import BatchRequest, plan_client
from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.reading_check import prepare_reading
from lightning_fcl.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from lightning_fcl.data.stream import FederatedStream


class ClientLoader:
    """Loader of a stream's training data. With a `FederatedStrategy`, the batches of each round replace this loader.

    In a Trainer without this strategy, the loader yields the batches of a single client. Each epoch is a round.
    """

    def __init__(self, stream: FederatedStream) -> None:
        self.stream = stream
        self._began = False

    def __len__(self) -> int:
        if self.stream.count_batches is None:
            raise InvalidTypeError(
                'Expected a running fit of a Trainer with `strategy="federated"`, because the number of batches '
                "depends on this Trainer, but no such fit is running.",
                argument="strategy",
            )
        return self.stream.count_batches()

    def __iter__(self) -> Iterator[Any]:
        stream, plan, trainer = self.stream, self.stream.plan, self.stream.trainer
        if len(plan.clients) == 1 and trainer is None:
            raise InvalidValueError(
                "Expected a Trainer that reads the batches of the stream, but the stream has no Trainer.",
                hint="Pass the stream to `trainer.fit(module, datamodule=stream)`.",
                argument="datamodule",
            )
        if len(plan.clients) != 1 or trainer is None:
            actual = (
                "no Trainer" if trainer is None else "a Trainer without this strategy, which trains a single client"
            )
            raise InvalidValueError(
                f'Expected a Trainer with `strategy="federated"` for a stream of {len(plan.clients)} clients, but got '
                f"{actual}.",
                hint="Use `L.Trainer(strategy=FederatedStrategy())`, or a stream of one client.",
                argument="strategy",
            )
        client, round_idx = plan.clients[0], current_round(trainer)
        if round_idx >= plan.num_rounds and trainer.max_epochs == plan.num_rounds:
            # When a finished fit is resumed, the Trainer requests a batch before it detects that no epoch is left.
            return
        if round_idx >= plan.num_rounds:
            raise InvalidValueError(
                f"Expected `max_epochs` to be at most {plan.num_rounds} and not -1, because the stream has "
                f"{plan.num_rounds} round(s), but got {trainer.max_epochs}.",
                hint=f"Set `max_epochs={plan.num_rounds}`.",
                argument="max_epochs",
                value=trainer.max_epochs,
            )
        if not self._began:
            prepare_reading(stream.samples, plan.train[round_idx][client], stream.seed)
            self._began = True
        if stream.local_batches is not None:
            yield from stream.local_batches(client, round_idx)
            return
        rows = plan.train[round_idx][client]
        batches = plan_client(len(rows), stream.batch_plan, stream.seed, client, round_idx)
        requests = (
            BatchRequest.keyed(rows[own], stream.seed, client, round_idx, 0, step) for step, own in enumerate(batches)
        )
        yield from (
            stream.read_batches(requests)
            if stream.samples.is_random
            else (stream.get_samples(one.rows) for one in requests)
        )
