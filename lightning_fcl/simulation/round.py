"""A round in four steps: download, local training, upload, aggregation."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.errors import listed, quoted
from lightning_fcl.federation.aggregation import State, entries, load_entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.local_training import Start, Trained
from lightning_fcl.federation.messages import DIVERGED
from lightning_fcl.federation.protocol import ListensToClients, ListensToRounds, SolvesAtServer
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.randomness import seed_of, start_randomness
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.limits import there
from lightning_fcl.simulation.loader import BatchContext
from lightning_fcl.simulation.loose_state import LooseState
from lightning_fcl.simulation.rehearsal import record_time
from lightning_fcl.simulation.sequential import SequentialTrainer

log = logging.getLogger(__name__)


def next_batch(federation: Federation) -> None:
    """Before a batch: whose it is."""
    federation.context = there(federation.loader, "a fit").contexts.popleft()
    if federation.context.first:
        download(federation, federation.context)


def end_batch(federation: Federation) -> None:
    """After a batch: perhaps its clients are done, perhaps the round."""
    context = there(federation.context, "a batch")
    if context.last:
        upload(federation, context)
    if context.last_of_round:
        aggregate(federation)


def idle(federation: Federation) -> None:
    """A round in which none of this process's clients trains."""
    _begin(federation)
    aggregate(federation)


def _begin(federation: Federation) -> None:
    if federation.round_done:  # what a hook has changed in the module since the last round is the server's
        federation.server.begin_round(federation.module, federation.rules, federation.extra)
        if isinstance(federation.trainer, SequentialTrainer):
            federation.loose = _loose_state(federation)
    federation.between_rounds = federation.round_done = False


def _loose_state(federation: Federation) -> LooseState:
    """What all clients of a round begin with beside the module's state; what of it they cannot is named once."""
    schedulers = [config.scheduler for config in federation.module.trainer.lr_scheduler_configs]
    loose = LooseState(federation.module, federation.optimizer, schedulers, federation.loose)
    if federation.loose is None and loose.unknown:
        log.warning(
            "Clients find %s of `%s` as those before have left it, if training changes it: it cannot be looked into.",
            quoted(loose.unknown),
            type(federation.module).__name__,
        )
    return loose


def download(federation: Federation, context: BatchContext) -> None:
    """Step 1: the clients receive the server's state, and remember what they have kept."""
    _begin(federation)
    federation.placement.begin()
    clients = context.client_rounds
    start_randomness(federation.seed, *clients.clients, federation.round)
    states, kept = federation.server.download(clients.clients)
    memories: list[Sequence[Memory]] = [()] * len(clients)
    if federation.methods:
        memories = [
            [_moved(federation, m.on_download(own.get(m.section, {}), state, client)) for m in federation.methods]
            for client, state, own in zip(clients, states, kept, strict=True)
        ]
    trainer = there(federation.trainer, "a fit")
    federation.training = clients[0] if not trainer.stacked else None
    there(federation.local_steps, "a fit").begin(federation.optimizer)
    if federation.loose is not None:
        federation.loose.put_back()
    trainer.begin(Start(clients, states, memories, [own.get("optimizer", {}) for own in kept]))


def _moved(federation: Federation, memory: Memory) -> Memory:
    """What was on disk, or in a checkpoint, comes back on the CPU."""
    device = federation.module.device
    return memory if device.type == "cpu" else {name: value.to(device) for name, value in memory.items()}


def training_step(federation: Federation, batch: Batch, batch_idx: int | None = None) -> Tensor | None:
    """Step 2: the clients' own training, one step of it, whose number is that among their batches in the round."""
    context = there(federation.context, "a batch")
    weight = context.weight.to(federation.module.device) if context.weight is not None else None
    number = context.step if batch_idx is not None else None
    return there(federation.trainer, "a fit").training_step(batch, number, weight)


def drawing(federation: Federation) -> AbstractContextManager[object]:
    """Within this the backward pass of a step draws as the step does: penalties, and layers that compute once more."""
    trainer = federation.trainer
    random = trainer.random if isinstance(trainer, SequentialTrainer) else None
    return random.drawing() if random is not None else nullcontext()


def optimizer_step(
    federation: Federation, closure: Callable[[], object], step: Callable[[Callable[[], object]], object]
) -> object:
    """Take the gradients of a batch, and step the optimizer where it is the last of its group.

    Args:
        federation: The federation.
        closure: Computes loss and gradients.
        step: Steps the optimizer, given what computes the gradients.
    """
    context, trainer = there(federation.context, "a batch"), there(federation.trainer, "a fit")
    local, optimizer = there(federation.local_steps, "a fit"), federation.optimizer_in_use
    gather = local.next(optimizer, closure, context.active, context.last)
    if not local.complete:
        return gather()
    result = trainer.optimizer_step(lambda: step(gather), local.active)
    local.stepped(federation.optimizer, optimizer)
    if context.last and local.by_hand is None:  # now: schedules by round step before the batch has ended
        local.end_schedules(federation.optimizer)
    return result


def upload(federation: Federation, context: BatchContext) -> None:
    """Step 3: check each client's state, add it to the aggregate, and keep what stays with the client."""
    clients = context.client_rounds
    trained = there(federation.trainer, "a fit").finish()
    federation.placement.took(clients)
    participation = federation.participation
    missed = [participation.may_miss and participation.misses(client, federation.round) for client in clients.clients]
    taken = _send(federation, clients, {**trained.uploads, **_contributions(federation, context, trained)}, missed)
    _name_diverged(federation, clients, trained, taken)
    personal = federation.server.personal or federation.participation.swarm is not None
    listeners = [one for one in _callbacks(federation) if isinstance(one, ListensToClients)]
    if not (federation.methods or federation.keep_optimizer or personal or listeners):
        return  # nothing stays with the clients, and nobody looks at them
    for row, client in enumerate(clients):
        if not taken[row]:
            continue
        _end_client(federation, client, context, trained, row, missed[row])
        if listeners and trained.own is None:
            load_entries(federation.module, trained.state(row))
        for listener in listeners:
            listener.on_client_end(federation.module.trainer, federation.module, client)


def _contributions(federation: Federation, context: BatchContext, trained: Trained) -> State:
    """What the clients send to what the server keeps for methods, every entry of shape (clients, ...)."""
    sent: dict[str, list[Tensor]] = {}
    for i, method in enumerate(federation.methods):
        kept = federation.server_state(method.section)
        neutral = {n: federation.reductions[f"{method.section}.{n}"].nothing(value) for n, value in kept.items()}
        for row, client in enumerate(context.client_rounds if kept else ()):
            given = dict(neutral)
            if method.applies_to(client):
                data = context.samples(row) if method.needs_samples else None
                given |= method.contribute(trained.memories[row][i], trained.state(row), data, client)
            for name, value in given.items():
                sent.setdefault(f"{method.section}.{name}", []).append(value.to(federation.module.device))
    return {name: torch.stack(values) for name, values in sent.items()}


def _send(federation: Federation, clients: ClientRounds, states: State, missed: Sequence[bool]) -> list[bool]:
    """Send the states of those in reach; whether each client's state is one to go on with."""
    if not any(missed):
        return federation.server.upload(clients, states)
    federation.server.record.missed += itertools.compress(clients.clients, missed)
    fine = [True] * len(clients)
    rows = [row for row, out in enumerate(missed) if not out]
    if rows:
        sent = {name: value[rows] for name, value in states.items()}
        for row, taken in zip(rows, federation.server.upload([clients[row] for row in rows], sent), strict=True):
            fine[row] = taken
    return fine


def _name_diverged(federation: Federation, clients: ClientRounds, trained: Trained, taken: Sequence[bool]) -> None:
    """Name the clients whose loss was not finite and who send finite numbers all the same."""
    if trained.finite is None or bool(trained.finite.all()):
        return
    finite = trained.finite.tolist()
    names = [c for c, sound, taken_in in zip(clients.clients, finite, taken, strict=True) if taken_in and not sound]
    federation.record.diverged += names
    for name in names:
        message = "Round %d: the loss of client %s was not finite, though all that it sends is. %s"
        log.warning(message, federation.round, name, DIVERGED)


def _end_client(
    federation: Federation, client: ClientRound, context: BatchContext, trained: Trained, row: int, missed: bool
) -> None:
    """Keep what stays with a client."""
    state, kept = trained.state(row), {}
    for method, memory in zip(federation.methods, trained.memories[row], strict=True):
        if method.remembers(client):
            data = context.samples(row) if method.needs_samples else None
            kept[method.section] = method.end_round(memory, state, data, client, _generator(federation, client, method))
    if trained.optimizer is not None:
        kept["optimizer"] = trained.optimizer
    federation.server.keep(client.client, state, kept, missed)


def _generator(federation: Federation, client: ClientRound, method: Declaration) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(federation.seed, client.client, client.round, method.section))


def aggregate(federation: Federation) -> None:
    """Step 4: aggregate, put the server's state into the module, and end experiences."""
    federation.training = None
    there(federation.local_steps, "a fit").end_round(federation.optimizer)
    if federation.loose is not None:
        federation.loose.end_clients()
    federation.placement.meet(federation.server, federation.module.trainer)
    record_time(federation)
    _check_usable(federation)
    load_entries(federation.module, federation.server.finish_round())
    if isinstance(federation.module, SolvesAtServer):
        federation.module.on_after_aggregation()
    federation.round_done = True
    federation.record.skipped = there(federation.loader, "a fit").skipped
    federation.participation.elect(federation.record, federation.plan.clients)
    for method in federation.methods:
        if method.ends_undrawn:
            _end_undrawn(federation, method)
    for listener in _callbacks(federation):
        if isinstance(listener, ListensToRounds):
            listener.on_round_end(federation.module.trainer, federation.module)
    if federation.loose is not None:
        federation.loose.go_on()


def _check_usable(federation: Federation) -> None:
    """End a fit whose clients all send what is of no use."""
    record, dropped = federation.record, federation.record.dropped
    if federation.on_unusable_round == "stop" and dropped and not (record.trained or record.missed or record.late):
        who = listed((f"client {client} ({why})" for client, why in dropped.items()), most=3)
        raise ValueError(
            f"Expected uploads of round {federation.round} that are of use but all were dropped: {who}. {DIVERGED} To "
            'go on with the server as it was, give the strategy `on_unusable_round="warn"`.'
        )


def _callbacks(federation: Federation) -> list[Callback]:
    """The Trainer's, methods first: what they do is measured."""
    return sorted(callbacks_of(federation.module.trainer), key=lambda callback: not isinstance(callback, Declaration))


def _end_undrawn(federation: Federation, method: Declaration) -> None:
    """End the experiences that end with this round, for clients that were not drawn for it."""
    done = {*federation.record.trained, *federation.record.missed, *federation.record.dropped}
    for client in federation.client_rounds(federation.round):
        if client.client in done or not (client.last_round and method.remembers(client)):
            continue
        if not federation.hosts(client.client):
            continue
        data = federation.samples(client.client, client.round) if method.needs_samples else None
        own = {**entries(federation.module), **federation.own_entries(client.client)}
        memory, undrawn = federation.memory(client.client, method.section), client.not_drawn()
        ended = method.end_round(memory, own, data, undrawn, _generator(federation, client, method))
        federation.remember(client.client, method.section, ended)
