"""Adapter that runs each epoch of a plain Trainer as a round of a federation with one client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_fcl.data.batching import Batch, BatchRequest, order_keys, plan_batches
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.collation import concat_nested
from lightning_fcl.data.loader_stream import CLIENT, LoaderStream
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, load_state_tensors, state_tensors
from lightning_fcl.federation.client_store import ClientState, StateSection
from lightning_fcl.methods.base import MethodBase, make_client, methods_overriding
from lightning_fcl.methods.compose import local_epochs_fn
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.experience import lasting
from lightning_fcl.methods.local_federation import LocalFederation
from lightning_fcl.methods.method_round import LocalRound, MethodRound, client_before, entered_state
from lightning_fcl.methods.replay_samples import JoiningSamples, joining_samples


class EpochRounds:
    """An adapter that runs each epoch of a plain Trainer as a round of a federation with one client.

    The optimizers and the strategy are unchanged. No tensor of the module is aggregated. A `FederatedStream` yields the
    batches of each round as in a federation. Other data loaders are unchanged.

    Args:
        module: The module that the Trainer trains.
        methods: The methods among the Trainer's callbacks.
        local: The state of the one-client federation.
    """

    def __init__(self, module: L.LightningModule, methods: Sequence[MethodBase], local: LocalFederation) -> None:
        self._module, self._methods, self._local = module, methods, local
        self._planned = find_stream(module.trainer)
        # Keep the inputs of an epoch only if a method reads the samples of a round.
        self._loader = LoaderStream(any(method.needs.round_samples for method in methods))
        self.stream: FederatedStream | LoaderStream = self._loader if self._planned is None else self._planned
        self._round: MethodRound | None = None
        self._is_open = False
        # Number of batches of one local epoch if a `FederatedStream` plans the batches, otherwise 0.
        self._batches_per_epoch = 0
        if self._planned is not None:
            self._planned.local_batches = self._batches

    def close(self) -> None:
        """Restore the stream's own planning of batches."""
        if self._planned is not None:
            self._planned.local_batches = None

    def begin(self, number: int) -> tuple[ClientRound, State, list[StateSection]]:
        """Start the round of an epoch, and return the client's round, received state and state for each method.

        Args:
            number: Index of the epoch, from 0.

        Returns:
            The client's `ClientRound`, the state that the client received, and the client state of each method.
        """
        module, methods, server = self._module, self._methods, self._local.server
        client_round = self._enter(number)
        method_round = MethodRound(number, module, methods, self.stream, server, self.stream.seed)
        server.start_round(nn.Module(), extra_tensors=method_round.server_entries(), round_idx=number)
        (downloaded_state,), (self._kept,) = server.download([client_round.client_id])
        model = {name: value.detach().clone() for name, value in state_tensors(module).items()}
        self._begun: State = {**model, **server.state}
        self._received: State = {**model, **downloaded_state}
        self._entered: ClientState = entered_state(server, client_round, self._kept)
        memories = method_round.receive(client_round, self._received, self._entered)
        if self._planned is None:
            self._check_local_epochs(client_round, memories)
        self._round, self._is_open = method_round, True
        return client_round, self._received, memories

    def _enter(self, number: int) -> ClientRound:
        """Enter the round of an epoch and return the client's `ClientRound`."""
        client = CLIENT if self._planned is None else self._planned.plan.clients[0]
        if self._local.enter_round(client, number):
            for method in self._methods:
                entries = self._local.entries(method.section_name)
                for name in entries.keys() - lasting(method, entries).keys():
                    del self._local.server.extra_tensors[f"{method.section_name}.{name}"]
        if self._planned is None:
            self._loader.begin_round(self._local.fits, number, self._module.trainer.max_epochs)
        return self.stream.client_round(client, number)

    def _check_local_epochs(self, client_round: ClientRound, memories: Sequence[StateSection]) -> None:
        """Raise ValueError if a method needs several local epochs and the data is not a `FederatedStream`."""
        for method in methods_overriding(self._methods, "local_epochs"):
            memory = memories[self._methods.index(method)]
            epochs = method.local_epochs(make_client(method, self._module, memory, self._received, client_round))
            if epochs not in (None, 1):
                raise InvalidValueError(
                    f"Expected a `FederatedStream` for `{type(method).__name__}`, which trains for {epochs} local "
                    "epochs per round, but got another data loader.",
                    hint="Pass the data as a `FederatedStream`: `trainer.fit(module, datamodule=stream)`.",
                    argument="datamodule",
                    value=epochs,
                )

    def add(self, batch: Batch) -> None:
        """Add the samples of a labelled batch to the samples of the epoch if the data is not a `FederatedStream`."""
        if self._planned is None and is_labelled(batch):
            self._loader.add(plain_samples(batch[0]), plain_samples(batch[1]))

    def local_epoch(self, batch_idx: int) -> int:
        """Return the index of the local epoch of a batch, from 0. Always 0 if the data is not a `FederatedStream`."""
        return batch_idx // self._batches_per_epoch if self._batches_per_epoch else 0

    def end(self, memories: Sequence[StateSection], steps: int) -> None:
        """End the round if it has not ended yet.

        Args:
            memories: The client state of each method after local training.
            steps: Number of optimizer steps in the round.
        """
        if self._round is None or not self._is_open:
            return
        self._is_open = False
        module, server, method_round, name = self._module, self._local.server, self._round, self._local.client
        client_round, trained_state = self.stream.client_round(name, method_round.number), dict(state_tensors(module))
        samples = partial(self.stream.client_samples, name, method_round.number, self.stream.seed)
        client = LocalRound(
            client_round, self._received, self._kept, self._entered, steps, trained_state, memories, samples
        )
        uploaded_state = method_round.upload(client) if method_round.uploads else {}
        contributed = {name: value[None] for name, value in method_round.contribute(client).items()}
        if server.reductions and not all(server.upload([client_round], contributed)):
            method_round.end_dropped(client)
        else:
            server.save_client_state(name, {}, method_round.end(client))
        if uploaded_state:
            load_state_tensors(module, {name: uploaded_state[name].detach().clone() for name in trained_state})
        if server.reductions:
            server.aggregate()
        server.client_store.commit_round()
        if name not in server.record.dropped:
            method_round.take_turns(self._begun, 1.0)
            method_round.accept([name])

    def finish(self) -> None:
        """At the end of a fit, compute missing results of `MethodBase.end_experience` for the current experience."""
        if self._round is not None:
            self._round.finish_stopped([self._local.client], self._round.number + (not self._is_open))

    def _batches(self, client: str, number: int) -> Iterator[Any]:
        """Yield the batches of a round of the stream, as planned for a federation."""
        stream, seed = self._planned, self.stream.seed
        # Only a `FederatedStream` calls this function.
        assert stream is not None
        client_round = self._enter(number)
        client_of = partial(client_before, self._local.server, self._module)
        replayed, epochs = joining_samples(self._methods, client_of), local_epochs_fn(self._methods, client_of, 1)
        extra = JoiningSamples() if replayed is None else replayed(client_round)
        size, keys = client_round.num_samples, order_keys(seed, [client], number)
        plan = plan_batches(
            size, epochs if isinstance(epochs, int) else epochs(client_round), stream.batch_plan, keys, len(extra)
        )
        of_epoch = stream.batch_plan.batches_per_epoch(np.array([size]), np.array([len(extra)]))
        self._batches_per_epoch = int(of_epoch[0])
        rows = stream.plan.train[number][client]
        requests = (
            BatchRequest.keyed(
                rows[sample_indices[sample_indices < size]], seed, client, number, step // self._batches_per_epoch, step
            )
            for step, sample_indices in enumerate(plan)
        )
        batches = (
            stream.read_batches(requests)
            if stream.samples.is_random
            else (stream.get_samples(request.rows) for request in requests)
        )
        for step, (sample_indices, batch) in enumerate(zip(plan, batches, strict=True)):
            joining: Tensor = torch.from_numpy(sample_indices[sample_indices >= size] - size)
            if replayed is not None:
                batch = plain_samples(batch)
            yield concat_nested([batch, extra.take(joining, seed, client, number, step)]) if len(joining) else batch
