"""A simulation's round: who trains in this process, what comes together of it, and what a rehearsed clock says."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.client_round import current_round
from lightning_fcl.errors import InvalidValueError, listed
from lightning_fcl.federation.aggregation import State, entries, frozen_parameters, load_entries, reductions_of, resolve
from lightning_fcl.federation.protocol import ListensToRounds, SolvesAtServer
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.schedule import Deployment
from lightning_fcl.federation.wire import DIVERGED, Compression
from lightning_fcl.methods.declaration import overrides
from lightning_fcl.methods.functional import trainable
from lightning_fcl.methods.method_round import server_entries
from lightning_fcl.simulation.cohort import planned
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.hook_calls import skip_batch_end
from lightning_fcl.simulation.hooks import FitHooks
from lightning_fcl.simulation.round import Round, methods_first


def begin_schedule(federation: Federation) -> None:
    """Begin the schedule, if there is one, with the stream and the sizes of messages.

    Raises:
        ValueError: If nobody has enough samples in a round, or sums of experiences need other clients.
    """
    check_sums(federation)
    if federation.strategy.new_round is simulated:  # nodes of a deployment report in each round whether they can train
        federation.participation.check_samples(federation.stream.plan, federation.module.trainer.max_epochs or 0)
    schedule, server = federation.participation.schedule, federation.server
    if schedule is None:
        return
    module = federation.module
    state, reductions = dict(entries(module)), reductions_of(module, federation.strategy.rules)
    for name, (value, reduction) in server_entries(federation.methods, module).items():
        state[name], reductions[name] = value, resolve(name, reduction)
    learnt = [*trainable(module)]
    frozen = frozen_parameters(module, reductions)
    sent = {n: value for n, value in state.items() if n not in frozen and not reductions[n].once}
    sizes = message_bytes(sent, reductions, server.compression, learnt)
    deployment = Deployment(
        federation.stream.plan, federation.participation, federation.strategy.local_epochs, *sizes, reductions
    )
    schedule.begin(deployment, current_round(module.trainer))


def check_sums(federation: Federation) -> None:
    """Raise ValueError if a method's sums of an experience would mix those of clients in different experiences."""
    plan, full = federation.stream.plan, federation.participation.is_full
    methods = [method for method in federation.methods if overrides(method, "contribute_experience")]
    if methods and not full and len({*plan.experiences.values()}) > 1:
        name = type(methods[0]).__name__
        raise InvalidValueError(
            f"Expected `participation=1.0` for `{name}` in a stream whose clients enter experiences in different "
            f"rounds but got {federation.participation.clients}.",
            hint="Use `participation=1.0`, or a scenario whose clients enter each experience together.",
            argument="participation",
            value=federation.participation.clients,
        )


def message_bytes(
    state: State, reductions: Mapping[str, Reduction], compression: Compression | None, learnt: Collection[str]
) -> tuple[int, int]:
    """Bytes that a client receives and sends in a round, as far as they are known beforehand.

    Entries of which a part travels (``sparse_mean``) count as a whole, so that the sizes are the same after a resume.

    Args:
        state: The entries.
        reductions: The reduction of each.
        compression: Code of the ``learnt`` entries whose reduction is ``mean``.
        learnt: Names of the trainable parameters.

    Example:
        >>> import torch
        >>> from lightning_fcl.federation.reductions import Mean, Own
        >>> message_bytes({"w": torch.zeros(3), "head": torch.zeros(5)}, {"w": Mean(), "head": Own()}, None, ["w"])
        (12, 12)
    """
    down = sum(value.nbytes for name, value in state.items() if reductions[name].down)
    up = 0
    for name, value in state.items():
        code = compression if name in learnt and reductions[name].name == "mean" else None
        if code is not None and code.saves(value):
            up += code.nbytes(value.numel(), value.element_size())
        elif reductions[name].up:
            up += value.nbytes
    return down, up


def record_time(federation: Federation) -> None:
    """Write down what the clock says of the round: who was late, who was stale, and how long it took."""
    schedule, record = federation.participation.schedule, federation.server.record
    if schedule is None:
        return
    timed = schedule.timed(federation.round.number)
    record.staleness, record.simulated_seconds = dict(timed.staleness), timed.seconds
    record.late = list(timed.late)
    for client in timed.late:  # which had received the server's state all the same
        record.download(client, schedule.deployment.download_bytes)


def simulated(federation: Federation) -> Round:
    """The round at hand, for which clients are drawn, and which of them train in this process."""
    number, size = current_round(federation.module.trainer), federation.trainer.clients_at_once
    if number >= (federation.module.trainer.max_epochs or 0):  # of a finished fit that is continued
        return Round(federation, (), partial(_simulate, skipped=()))
    plan = federation.stream.plan
    names, skipped = federation.participation.draw(plan, number)
    samples = {client: len(plan.train[number][client]) for client in names}
    if size > 1:  # like lengths together, so that little is padded and few wait for others
        names = sorted(names, key=lambda client: -samples[client])
    cohorts = [names[start : start + size] for start in range(0, len(names), size)]
    if federation.placement is not None and federation.strategy.ranks.number > 1:
        cohorts = [cohorts[place] for place in federation.placement.place(cohorts, samples)]
    return Round(federation, planned(federation, cohorts, number), partial(_simulate, skipped=skipped))


def _simulate(round: Round, skipped: Sequence[str]) -> Generator[Any, None, None]:
    """Train the clients, and aggregate their uploads."""
    if round.federation.isolation is not None:
        round.federation.isolation.warn()
    if not round.cohorts:
        with _without_batch_hooks(round.federation):
            yield None
    while round.cohorts:
        yield from round.train(round.cohorts.popleft(), round.federation.server.upload)
        if round.cohorts:
            yield None
    aggregate(round, skipped)


@contextmanager
def _without_batch_hooks(federation: Federation) -> Iterator[None]:
    """Temporarily call no `on_train_batch_end` of users: a process without clients has no batch in the round."""
    module = federation.module
    trainer, callbacks = module.trainer, callbacks_of(module.trainer)
    trainer.callbacks = [one for one in callbacks if isinstance(one, FitHooks)]  # type: ignore[attr-defined]
    skip_batch_end(module)
    try:
        yield
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]


def aggregate(round: Round, skipped: Sequence[str]) -> None:
    """Step 4: aggregate, put the server's state into the module, and end experiences.

    Args:
        skipped: Clients that were sampled but had no data, or too few samples to train on.
    """
    federation = round.federation
    record = federation.server.record
    round.cohort = None
    federation.strategy.local_steps.end_round(federation.optimizers, ranks=round.placement.ranks)
    federation.epoch_states.leave()
    if round.loose is not None:
        round.loose.end_clients()
    round.placement.meet(federation.server)
    federation.strategy.counters.step_together(round.placement.ranks, round.steps_before)
    record_time(federation)
    _check_usable(federation, round.number)
    begun = federation.server.state
    load_entries(federation.module, federation.server.finish_round())
    if isinstance(federation.module, SolvesAtServer):
        federation.module.on_after_aggregation()
    if record.trained and federation.methods:
        share = len(record.trained) / len(federation.stream.plan.clients)
        round.method_round.take_turns(begun, share)
    round.method_round.accept(record.trained)
    round.done = True
    record.skipped = [client for client in federation.stream.plan.clients if client in skipped]
    federation.participation.elect(record, federation.stream.plan.clients)
    for listener in methods_first(federation):
        if isinstance(listener, ListensToRounds):
            listener.on_round_end(federation.module.trainer, federation.module)
    if round.loose is not None:
        round.loose.go_on()
    federation.epoch_states.resume()


def _check_usable(federation: Federation, number: int) -> None:
    """End a fit whose clients all send what is of no use."""
    record = federation.server.record
    dropped = record.dropped
    if federation.strategy.stops_unusable and dropped and not (record.trained or record.missed or record.late):
        who = listed((f"client {client} ({why})" for client, why in dropped.items()), most=3)
        raise InvalidValueError(
            f"Expected uploads of round {number} that are of use but all were dropped: {who}.",
            hint=f'{DIVERGED} To go on with the server as it was, give the strategy `on_unusable_round="warn"`.',
            argument="on_unusable_round",
            value=dropped,
        )
