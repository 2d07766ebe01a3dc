"""A round: the train loader of one epoch, and the steps of the server and of the clients."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_fcl.callbacks.weight_averaging import ServerWeightAveraging
from lightning_fcl.data.client_round import ClientRounds, current_round
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.federation.aggregation import State, load_state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.compression import DIVERGENCE_HINT
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.protocols import (
    ClientEndListener,
    ClientStateReader,
    HasAggregationHook,
    RoundEndListener,
)
from lightning_fcl.federation.record import RoundRecord
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Messages
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.stacked_trainer import stack
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.method import get_driver
from lightning_fcl.methods.method_round import MethodRound, entered_state
from lightning_fcl.rng import seed_all
from lightning_fcl.simulation.client_group import ClientGroup
from lightning_fcl.simulation.federation import Federation, require_started
from lightning_fcl.simulation.finite_check import warn_of_non_finite_samples
from lightning_fcl.simulation.hook_calls import enter, find_users, leave, without_batch_hooks
from lightning_fcl.simulation.isolation_trial import isolation_of
from lightning_fcl.simulation.planning import plan_client_groups
from lightning_fcl.simulation.round_progress import RoundProgress
from lightning_fcl.simulation.round_steps import check_usable, record_time
from lightning_fcl.simulation.setup_checks import check_optimizers

log = logging.getLogger(__name__)


class Round:
    """The train loader of a round, which is one epoch of the Trainer. `run` contains all steps of the round.

    The length of the loader is known, so Lightning requests a batch only after the previous batch is done. After the
    last batch of a group of clients, `FitHooks` continues the round, and the clients upload. Users' hooks at the end of
    this batch run before the upload.

    `run` yields one iterator of batches per group. If the iterator is advanced after its last batch, the group uploads.

    This class is the round of a simulation. The server and the nodes of a deployment replace some steps of this class.

    Args:
        federation: The federation.
        looks_ahead: Whether methods skip `end_experience` in a round if a later round of the experience is certain to
            compute the client's result again.
    """

    def __init__(self, federation: Federation, looks_ahead: bool = True) -> None:
        self.federation = federation
        self.number = current_round(federation.module.trainer)
        self.sampled: list[str] = []  # the clients that train in the round, including clients of other processes
        self.no_data: list[str] = []  # sampled clients without data, or with too few samples to train on
        self.progress = federation.progress = RoundProgress(self.number)
        self._steps_before = 0  # the Trainer's number of steps at the start of the round
        self.method_round = MethodRound(
            self.number,
            federation.module,
            federation.methods,
            federation.stream,
            federation.server,
            federation.seed,
            federation.participation.is_full,
            looks_ahead,
        )
        self._listeners: list[ClientEndListener] = []
        self._watched = False  # whether a listener reads client states
        # Generator of the batches that client groups request. None: all samples are in memory.
        self._read: Generator[Any, None, None] | None = None
        groups = self.plan_groups()
        self._batches = max(1, sum(map(len, groups)))
        self.progress.client_groups = deque(groups or (None,))
        self.steps: Generator[Iterator[Any], None, None] = self.run()
        self.training: Generator[Any, None, None] = self.train_clients(None)  # batches of the current group

    @property
    def placement(self) -> Placement:
        """The assignment of clients to processes."""
        return require_started(self.federation.placement, "a fit")

    def __len__(self) -> int:
        """Number of batches of the round in this process, at least 1.

        While a client trains, hooks get the number of batches of this client.
        """
        counters = self.federation.counters
        return counters.batches if counters.shown else self._batches

    def __iter__(self) -> Iterator[Any]:
        self.steps = self.run()
        return itertools.chain.from_iterable(self.steps)

    def run(self) -> Generator[Iterator[Any], None, None]:
        """Run the round. Yield an iterator of batches for each group of clients that trains at the same time."""
        self.start()
        try:
            while self.progress.client_groups:
                self.progress.client_group = self.progress.client_groups.popleft()
                self.training = self.train_clients(self.progress.client_group)
                yield self.training
            self.aggregate()
            self.finish()
        except BaseException:  # A hook has failed, or has stopped the fit, which closes the generator.
            if not self.progress.done:
                self.roll_back()
            raise
        finally:
            self.training.close()
            if self._read is not None:
                self._read.close()  # Otherwise the garbage collector would end the worker processes only later.
                self._read = None

    def finalize(self) -> None:
        """Finish the round after the last hook of its last batch. Roll the round back if it was interrupted."""
        federation, trainer = self.federation, self.federation.module.trainer
        if not self.progress.settled:
            if federation.loose is not None:
                federation.loose.finalize()
            self.steps.close()
            federation.counters.end()
            leave(trainer)
            federation.use_optimizer(trainer)
            self.progress.settled = True

    # Steps of a round.

    def plan_groups(self) -> Sequence[ClientGroup]:
        """Sample the clients of the round. Return the groups of those clients that train in this process."""
        federation, number, plan = self.federation, self.number, self.federation.stream.plan
        if number >= (federation.module.trainer.max_epochs or 0):  # A finished fit was resumed: no round is left.
            return []
        names, self.no_data = federation.participation.sample_on_time_clients(plan, number)
        self.sampled = [*names]
        samples = {client: len(plan.train[number][client]) for client in names}
        size = federation.local_trainer.num_vectorized_clients
        if size > 1:  # Group clients with similar numbers of samples, which reduces padding and waiting.
            names = sorted(names, key=lambda client: -samples[client])
        groups = [names[start : start + size] for start in range(0, len(names), size)]
        if federation.placement is not None and federation.ranks.num_ranks > 1:
            groups = [groups[place] for place in federation.placement.assign(groups, samples)]
        return plan_client_groups(federation, groups, number)

    def start(self) -> None:
        """Start the round from the module's state, which includes changes by hooks since the last round."""
        federation = self.federation
        check_optimizers(federation)
        self._steps_before = federation.module.trainer.global_step
        if federation.methods:
            get_driver(federation.module.trainer).rest_frozen(federation.module)
        federation.counters.users = find_users(federation.module.trainer)
        extra = self.method_round.server_entries()
        federation.server.start_round(federation.module, federation.settings.rules, extra, self.number)
        loose = None
        if isinstance(federation.local_trainer, SequentialTrainer):
            federation.isolation = federation.isolation or isolation_of(federation)
            previous_snapshot, optimizers = federation.loose, federation.optimizers
            loose = federation.loose = federation.isolation.loose_state(
                federation.module, optimizers, previous_snapshot
            )
        federation.epoch_states.begin(federation.module, loose)
        self._listeners = [one for one in ordered_callbacks(federation) if isinstance(one, ClientEndListener)]
        self._watched = any(
            not isinstance(one, ClientStateReader) or one.needs_client_state(federation.module)
            for one in self._listeners
        )
        if federation.stream.samples.is_random:
            requests = (
                request
                for client_group in [*self.progress.client_groups]
                if client_group is not None
                for request in client_group.requests()
            )
            self._read = federation.stream.read_batches(requests)
        self.exchange(self.sampled)
        self.progress.done = self.progress.settled = False

    def exchange(self, clients: Sequence[str], is_after_upload: bool = False) -> None:
        """Let the upload transforms exchange messages with clients, before or after the uploads."""
        server, placement = self.federation.server, self.placement
        if server.pipeline.exchanges:
            server.exchange(clients, placement.ranks, placement.hosts, is_after_upload)

    def train_clients(self, client_group: ClientGroup | None) -> Generator[Any, None, None]:
        """Let a group of clients download, yield their batches for training, and let the clients upload.

        Args:
            client_group: The clients. None: no client trains in this process. The round then has one empty batch.
        """
        if self.federation.isolation is not None:
            self.federation.isolation.warn()
        if client_group is None:
            with without_batch_hooks(self.federation.module):
                yield None
            return
        self.download(client_group)
        yield from client_group.batches(self._read)
        self.upload(client_group)

    def aggregate(self) -> None:
        """Aggregate the uploads, and load the server's new state into the module."""
        federation, server = self.federation, self.federation.server
        self.progress.client_group = None
        federation.local_steps.end_round(federation.optimizers, ranks=self.placement.ranks)
        federation.epoch_states.leave()
        if federation.loose is not None:
            federation.loose.finish_clients()
        self.placement.sync(server)
        federation.counters.step_together(federation.module.trainer, self.placement.ranks, self._steps_before)
        record_time(federation, self.number)
        check_usable(federation, self.number)
        self.exchange(server.record.accepted, is_after_upload=True)
        received_state = server.state
        load_state_tensors(federation.module, server.aggregate())
        if isinstance(federation.module, HasAggregationHook):
            federation.module.on_after_aggregation()
        # With privacy, the steps of methods must not depend on the clients that took part.
        is_private, num_clients = federation.privacy is not None, len(federation.stream.plan.clients)
        if federation.methods and (server.record.accepted or is_private):
            num_uploads = federation.privacy.expected_clients if federation.privacy else len(server.record.accepted)
            self.method_round.take_turns(received_state, num_uploads / num_clients)
        self.method_round.accept(server.record.accepted)
        self.progress.done = True

    def finish(self) -> None:
        """Complete the record of the round, and call `on_round_end` of the callbacks."""
        federation, record = self.federation, self.federation.server.record
        record.no_data = [client for client in federation.stream.plan.clients if client in self.no_data]
        federation.participation.elect_master(record, federation.stream.plan.clients)
        for listener in ordered_callbacks(federation):
            if isinstance(listener, RoundEndListener):
                listener.on_round_end(federation.module.trainer, federation.module)
        if federation.loose is not None:
            federation.loose.commit()
        federation.epoch_states.resume()

    def roll_back(self) -> None:
        """Restore the states of the server and of the clients from before the interrupted round."""
        federation = self.federation
        if self.progress.has_trained or self.number:  # Otherwise the fit has not changed anything yet.
            log.warning("Rolled back an interrupted round: restored the server state and the client states.")
        self.progress.client_group = None
        federation.counters.end()
        leave(federation.module.trainer)
        federation.epoch_states.undo()
        if federation.loose is not None:
            federation.loose.finalize()
        federation.local_steps.end_round(federation.optimizers, whole=False)
        load_state_tensors(federation.module, federation.server.state)
        federation.server.undo_round()

    # Steps of a group of clients.

    def download(self, client_group: ClientGroup) -> None:
        """Start the local training of a group from the server's state and the saved client states."""
        federation, clients = self.federation, client_group.clients
        trainer, local_steps = federation.module.trainer, federation.local_steps
        federation.counters.begin(trainer, client_group, local_steps, federation.optimizers)
        enter(trainer, federation.counters)
        self.placement.start_timer()
        seed_all(federation.seed, *clients.client_ids, self.number)
        states, previous_states = federation.server.download(clients.client_ids)
        entered_states = previous_states
        if any(previous_states):
            entered_states = [
                entered_state(federation.server, *each) for each in zip(clients, previous_states, strict=True)
            ]
        memories: list[Sequence[StateSection]] = [()] * len(clients)
        if federation.methods:
            memories = [self.method_round.receive(*each) for each in zip(clients, states, entered_states, strict=True)]
        local_steps.start(federation.optimizers)
        federation.epoch_states.leave()
        if federation.loose is not None:
            federation.loose.restore()
        client_group.received, client_group.kept, client_group.entered = states, previous_states, entered_states
        federation.epoch_states.enter(self.placement.order.get(clients.client_ids[0], 0))
        federation.local_trainer.start(clients, states, memories, [own.get("optimizer", {}) for own in entered_states])

    def upload(self, client_group: ClientGroup) -> None:
        """Upload the results of the clients, and save their client states."""
        federation, clients, participation = self.federation, client_group.clients, self.federation.participation
        trained = federation.local_trainer.finish()
        federation.server.record.train_losses |= client_group.train_losses(trained)
        federation.server.record.train_samples |= client_group.train_samples
        self.placement.record_time(clients)
        missed = [
            participation.may_miss_sync and participation.misses_sync(client, self.number)
            for client in clients.client_ids
        ]
        local_rounds = (
            [client_group.local_round(row, trained) for row in range(len(clients))] if federation.methods else []
        )
        uploads = trained.uploads
        if self.method_round.uploads:
            uploads = stack([self.method_round.upload(client) for client in local_rounds])
        if federation.methods:
            uploads = {**uploads, **stack([self.method_round.contribute(client) for client in local_rounds])}
        server, messages = federation.server, self.method_round.messages(local_rounds)
        if any(missed):
            arrived = _upload_reachable(server, clients, uploads, messages, missed)
        else:
            arrived = server.upload(clients, uploads, messages)
        _name_diverged(server.record, clients, trained, arrived)
        for name in itertools.compress(clients.client_ids, (not is_accepted for is_accepted in arrived)):
            warn_of_non_finite_samples(federation.stream, name, self.number)
        personal = server.has_local_state or participation.swarm is not None
        keeping = bool(federation.methods) or federation.settings.keep_optimizer_state or personal
        if not (keeping or self._listeners):
            return  # No state is saved, and no callback needs the clients.
        for row, client in enumerate(clients):
            if not arrived[row]:
                if local_rounds:
                    self.method_round.end_dropped(local_rounds[row])
                continue
            if keeping:
                client_state = self.method_round.end(local_rounds[row], missed[row]) if local_rounds else {}
                if trained.optimizer_state is not None:
                    client_state["optimizer"] = trained.optimizer_state
                server.save_client_state(clients.client_ids[row], trained.trained_state(row), client_state, missed[row])
            if self._watched and trained.module_state is None:
                load_state_tensors(federation.module, trained.trained_state(row))
            if not self._listeners:
                continue
            with federation.counters.after_client(client_group.batches_of(row)):
                for listener in self._listeners:
                    listener.on_client_end(federation.module.trainer, federation.module, client)


def ordered_callbacks(federation: Federation) -> list[Callback]:
    """Return the Trainer's callbacks: methods, then averages of the server's model, then callbacks that observe it."""
    places = {MethodBase: 0, ServerWeightAveraging: 1}
    return sorted(
        get_callbacks(federation.module.trainer),
        key=lambda callback: next((place for kind, place in places.items() if isinstance(callback, kind)), 2),
    )


def _upload_reachable(
    server: FederatedServer, clients: ClientRounds, states: State, messages: Messages, missed: Sequence[bool]
) -> list[bool]:
    """Upload the results of the clients that do not miss the synchronization.

    Returns:
        For each client, whether its new client state is kept. False for a client whose upload the server drops.
    """
    server.record.missed_sync += itertools.compress(clients.client_ids, missed)
    upload_results = [True] * len(clients)
    rows = [row for row, out in enumerate(missed) if not out]
    if rows:
        reachable_states = {name: value[rows] for name, value in states.items()}
        reachable_messages = {section: [each[row] for row in rows] for section, each in messages.items()}
        reachable_clients = ClientRounds.from_rounds([clients[row] for row in rows])
        for row, is_accepted in zip(
            rows, server.upload(reachable_clients, reachable_states, reachable_messages), strict=True
        ):
            upload_results[row] = is_accepted
    return upload_results


def _name_diverged(record: RoundRecord, clients: ClientRounds, trained: LocalResult, arrived: Sequence[bool]) -> None:
    """Record clients that had a non-finite loss although their upload was not dropped. Warn about each client."""
    if trained.has_finite_loss is None or bool(trained.has_finite_loss.all()):
        return
    finite = trained.has_finite_loss.tolist()
    names = [c for c, sound, came in zip(clients.client_ids, finite, arrived, strict=True) if came and not sound]
    record.diverged += names
    for name in names:
        message = "Round %d: the loss of client %s was non-finite, but its upload is finite. %s"
        log.warning(message, clients.round_idx, name, DIVERGENCE_HINT)
