"""A deployment is rehearsed: the schedule learns what it is for, and each round's record what its clock says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_fcl.data.client_round import current_round
from lightning_fcl.federation.aggregation import State, entries, frozen_parameters, reductions_of, resolve
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.schedule import Deployment
from lightning_fcl.methods.functional import trainable
from lightning_fcl.simulation.federation import Federation, extra_of


def begin_schedule(federation: Federation) -> None:
    """Tell the schedule, if there is one, of the stream and of the sizes of messages."""
    schedule, server = federation.participation.schedule, federation.server
    if schedule is None:
        return
    module = federation.module
    state, reductions = dict(entries(module)), reductions_of(module, federation.strategy.rules)
    for name, (value, reduction) in extra_of(federation).items():
        state[name], reductions[name] = value, resolve(name, reduction)
    learnt = [*trainable(module)]
    frozen = frozen_parameters(module, reductions)
    sent = {name: value for name, value in state.items() if name not in frozen}
    sizes = message_bytes(sent, reductions, server.compression, learnt)
    deployment = Deployment(
        federation.stream.plan, federation.participation, federation.strategy.local_epochs, *sizes, reductions
    )
    schedule.begin(deployment, current_round(module.trainer))


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
