"""A round: a train loader of one epoch, and what clients do in it, in a simulation as on a node of a deployment."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.client_round import ClientRound, ClientRounds, current_round
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import State, load_entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Trained
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.protocol import ListensToClients, LooksAtClients
from lightning_fcl.federation.wire import DIVERGED, RoundRecord
from lightning_fcl.local.loose_state import LooseState
from lightning_fcl.local.sequential import SequentialTrainer
from lightning_fcl.local.stacked import stack
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.methods.method import driver_of
from lightning_fcl.methods.method_round import LocalRound, MethodRound, entered_state
from lightning_fcl.randomness import start_randomness
from lightning_fcl.simulation.cohort import Cohort
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.hook_calls import find_users
from lightning_fcl.simulation.isolation import isolation_of
from lightning_fcl.simulation.limits import check_optimizers, require_begun

log = logging.getLogger(__name__)

Send = Callable[[ClientRounds, State], list[bool]]
"""Takes what clients send, every entry of shape (clients, ...), and says whether each one's is of use."""

Work = Callable[["Round"], Generator[Any, None, None]]
"""What is done in a round that has begun."""


class Round:
    """The batches of a round, which is an epoch: between them clients begin and end, and the server at the end.

    Its length is known, so that Lightning asks for a batch when it has done with the one before. When the last batch of
    a cohort is done, `FitHooks` resumes the generator, which uploads, before other hooks see the end of the batch.

    Args:
        federation: The federation, whose round at hand it is.
        cohorts: The clients that train in this process, some at a time.
        work: All that is done in the round once it has begun. It yields the batches, and None where there are none:
            after each cohort but the last one, for `resume`, and in place of cohorts.
        looks_ahead: Whether a result for an experience is left to the client's next round if that is sure to come.
    """

    def __init__(self, federation: Federation, cohorts: Iterable[Cohort], work: Work, looks_ahead: bool = True) -> None:
        self.federation = federation
        self.number = current_round(federation.module.trainer)
        self.cohorts = deque(cohorts)  # those that are yet to train
        self.cohort: Cohort | None = None  # the clients that train now, or have done so last
        self.done, self.settled = False, True
        before = federation.strategy.round
        self.loose: LooseState | None = before.loose if before is not None else None
        self.steps_before = 0  # the Trainer's, when the round began
        self.has_trained = False  # whether clients have trained on a batch of the round
        self._work = work
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
        self._listeners: list[ListensToClients] = []
        self._watched = False  # whether one of them looks at clients' states
        # Batches for the requests of the client groups. None: samples are in memory.
        self._read: Generator[Any, None, None] | None = None
        self._batches = max(1, sum(map(len, self.cohorts)))
        self._steps: Generator[Any, None, None] = self._run()

    @property
    def client_round(self) -> ClientRound | None:
        """The client that trains now; None between rounds, and where several train side by side."""
        return self.cohort.client_round if self.cohort is not None else None

    @property
    def local_epoch(self) -> int:
        """The local epoch, from 0, of the batch at hand."""
        return self.cohort.local_epoch if self.cohort is not None else 0

    @property
    def last_batch(self) -> bool:
        """Whether the batch at hand is the last one of its clients' local training."""
        return self.cohort is None or self.cohort.last_batch

    @property
    def placement(self) -> Placement:
        """Whose clients train where."""
        return require_begun(self.federation.placement, "a fit")

    def __len__(self) -> int:
        """Number of batches of this process's clients; 1 if it has none. For the hooks of a client, its batches."""
        counters = self.federation.strategy.counters
        return counters.batches if counters.shown else self._batches

    def __iter__(self) -> Iterator[Any]:
        self._steps = self._run()
        return self._steps

    def _run(self) -> Generator[Any, None, None]:
        self.begin()
        try:
            if self.cohorts and self.federation.stream.samples.draws:
                requests = (request for cohort in [*self.cohorts] for request in cohort.requests())
                self._read = self.federation.stream.read(requests)
            yield from self._work(self)
        except BaseException:  # also where it is closed: a hook has failed, or stopped the fit
            if not self.done:
                self.abandon()
            raise
        finally:
            if self._read is not None:
                self._read.close()  # torch waits seconds for workers that the garbage collector ends
                self._read = None

    def train(self, cohort: Cohort, send: Send) -> Iterator[Any]:
        """What some clients do in the round, wherever they are: they receive, train, send, and keep what is theirs."""
        self.cohort = cohort
        self.download(cohort)
        yield from cohort.batches(self._read)
        self.upload(cohort, send)

    def resume(self) -> None:
        """After a batch: if it was the last of its cohort, go on with the upload, and after the last one aggregate."""
        self.has_trained = True
        if self.last_batch:
            next(self._steps, None)
            self.federation.strategy.use_optimizer()

    def settle(self) -> None:
        """After the last hook of the last batch, or when it is cut short: the server's model is in the module."""
        if not self.settled:
            if self.loose is not None:
                self.loose.settle()
            self._steps.close()
            self.federation.strategy.counters.end()
            self.federation.strategy.use_optimizer()
            self.settled = True

    def begin(self) -> None:
        """Before the clients: what a hook has changed in the module since the last round is the server's."""
        federation = self.federation
        check_optimizers(federation)
        self.steps_before = federation.module.trainer.global_step
        if federation.methods:
            driver_of(federation.module.trainer).rest_frozen(federation.module)
        federation.strategy.counters.users = find_users(federation.module.trainer)
        extra = self.method_round.server_entries()
        federation.server.begin_round(federation.module, federation.strategy.rules, extra)
        if isinstance(federation.trainer, SequentialTrainer):
            federation.isolation = federation.isolation or isolation_of(self)
            self.loose = _loose_state(federation, self.loose)
        loose = self.loose if isinstance(federation.trainer, SequentialTrainer) else None
        federation.epoch_states.begin(federation.module, loose)
        self._listeners = [one for one in methods_first(federation) if isinstance(one, ListensToClients)]
        self._watched = any(
            not isinstance(one, LooksAtClients) or one.looks_at_clients(federation.module) for one in self._listeners
        )
        self.done = self.settled = False

    def abandon(self) -> None:
        """The round is cut short: no client's model stands in for the server's."""
        federation = self.federation
        if self.has_trained or self.number:  # otherwise the fit has changed nothing yet
            log.warning("A round was cut short: the server state, and what clients keep, stay as they were before it.")
        self.cohort = None
        federation.strategy.counters.end()
        federation.epoch_states.undo()
        if self.loose is not None:
            self.loose.settle()
        federation.strategy.local_steps.end_round(federation.optimizers, whole=False)
        load_entries(federation.module, federation.server.state)
        federation.server.store.undo_round()

    def download(self, cohort: Cohort) -> None:
        """Step 1: the clients receive the server's state, and remember what they have kept."""
        federation, clients = self.federation, cohort.clients
        federation.strategy.counters.begin(federation.module.trainer, cohort)
        self.placement.begin()
        start_randomness(federation.seed, *clients.clients, self.number)
        states, before = federation.server.download(clients.clients)
        kept = before
        if any(before):
            kept = [entered_state(federation.server, *each) for each in zip(clients, before, strict=True)]
        memories: list[Sequence[Memory]] = [()] * len(clients)
        if federation.methods:
            memories = [self.method_round.receive(*each) for each in zip(clients, states, kept, strict=True)]
        federation.strategy.local_steps.begin(federation.optimizers)
        federation.epoch_states.leave()
        if self.loose is not None:
            self.loose.put_back()
        cohort.received, cohort.kept, cohort.entered = states, before, kept
        federation.epoch_states.enter(self.placement.order.get(clients.clients[0], 0))
        federation.trainer.begin(clients, states, memories, [own.get("optimizer", {}) for own in kept])

    def upload(self, cohort: Cohort, send: Send) -> None:
        """Step 3: each client sends its state, and keeps what stays with it."""
        federation, clients, participation = self.federation, cohort.clients, self.federation.participation
        trained = federation.trainer.finish()
        self.placement.took(clients)
        missed = [participation.may_miss and participation.misses(client, self.number) for client in clients.clients]
        ended = [cohort.local_round(row, trained) for row in range(len(clients))] if federation.methods else []
        sent = trained.uploads
        if self.method_round.uploads:
            sent = stack([self.method_round.upload(client) for client in ended])
        if federation.methods:
            sent = {**sent, **stack([self.method_round.contribute(client) for client in ended])}
        arrived = _in_reach(send, federation.server.record, clients, sent, missed)
        _name_diverged(federation.server.record, clients, trained, arrived)
        personal = federation.server.personal or participation.swarm is not None
        keeping = bool(federation.methods) or federation.strategy.keep_optimizer or personal
        if not (keeping or self._listeners):
            return  # nothing stays with the clients, and nobody listens
        for row, client in enumerate(clients):
            if not arrived[row]:
                if ended:
                    self.method_round.end_dropped(ended[row])
                continue
            if keeping:
                self._end_client(cohort, trained, row, ended[row] if ended else None, missed[row])
            if self._watched and trained.own is None:
                load_entries(federation.module, trained.state(row))
            if not self._listeners:
                continue
            with federation.strategy.counters.after_client(cohort.batches_of(row)):
                for listener in self._listeners:
                    listener.on_client_end(federation.module.trainer, federation.module, client)

    def _end_client(self, cohort: Cohort, trained: Trained, row: int, client: LocalRound | None, missed: bool) -> None:
        """Keep what stays with a client."""
        kept = self.method_round.end(client, missed) if client is not None else {}
        if trained.optimizer is not None:
            kept["optimizer"] = trained.optimizer
        self.federation.server.keep(cohort.clients.clients[row], trained.state(row), kept, missed)


def methods_first(federation: Federation) -> list[Callback]:
    """The Trainer's, methods first: what they do is measured."""
    callbacks = callbacks_of(federation.module.trainer)
    return sorted(callbacks, key=lambda callback: not isinstance(callback, Declaration))


def _in_reach(
    send: Send, record: RoundRecord, clients: ClientRounds, states: State, missed: Sequence[bool]
) -> list[bool]:
    """Send the states of those in reach; whether each client's state is one to go on with."""
    if not any(missed):
        return send(clients, states)
    record.missed += itertools.compress(clients.clients, missed)
    fine = [True] * len(clients)
    rows = [row for row, out in enumerate(missed) if not out]
    if rows:
        sent = {name: value[rows] for name, value in states.items()}
        for row, taken in zip(rows, send(ClientRounds.of([clients[row] for row in rows]), sent), strict=True):
            fine[row] = taken
    return fine


def _name_diverged(record: RoundRecord, clients: ClientRounds, trained: Trained, arrived: Sequence[bool]) -> None:
    """Name the clients whose loss was not finite and who send finite numbers all the same."""
    if trained.finite is None or bool(trained.finite.all()):
        return
    finite = trained.finite.tolist()
    names = [c for c, sound, came in zip(clients.clients, finite, arrived, strict=True) if came and not sound]
    record.diverged += names
    for name in names:
        message = "Round %d: the loss of client %s was not finite, though all that it sends is. %s"
        log.warning(message, clients.round, name, DIVERGED)


def _loose_state(federation: Federation, before: LooseState | None) -> LooseState:
    """What all clients of a round begin with beside the module's state; what of it they cannot is named once."""
    schedulers = [config.scheduler for config in federation.module.trainer.lr_scheduler_configs]
    carried = federation.isolation.carried if federation.isolation is not None else None
    loose = LooseState(federation.module, federation.optimizers, schedulers, before, carried)
    if before is None and loose.unknown:
        log.warning(
            "Clients find %s of `%s` as those before have left it, if training changes it: it cannot be looked into.",
            quoted(loose.unknown),
            type(federation.module).__name__,
        )
    return loose
