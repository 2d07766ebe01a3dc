"""Steps of a round at the server: the simulated clock, and the check for usable uploads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_fcl.data.client_round import current_round
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, frozen_parameters, get_reduction, get_reductions, state_tensors
from lightning_fcl.federation.compression import DIVERGENCE_HINT
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.synchronization import TimingContext
from lightning_fcl.federation.uploads import UpdateCodec
from lightning_fcl.methods.base import overrides_hook
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.method_round import server_entries
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.validation import format_names


def start_synchronization(federation: Federation) -> None:
    """Start the simulated clock, if there is one, with the stream and the sizes of messages.

    Raises:
        ValueError: If a method sums over an experience, and the sampled clients can be in different experiences, see
            `check_sums`.
    """
    check_sums(federation)
    schedule, server = federation.participation.synchronization, federation.server
    if schedule is None:
        return
    module = federation.module
    state, reductions = dict(state_tensors(module)), get_reductions(module, federation.settings.rules)
    for name, (value, reduction) in server_entries(federation.methods, module).items():
        state[name], reductions[name] = value, get_reduction(name, reduction)
    learnt = [*trainable_parameters(module)]
    frozen = frozen_parameters(module, reductions)
    message_entries = {n: value for n, value in state.items() if n not in frozen and not reductions[n].once}
    sizes = message_nbytes(message_entries, reductions, server.pipeline.codec, learnt)
    deployment = TimingContext(
        federation.stream.plan, federation.participation, federation.settings.local_epochs, *sizes, reductions
    )
    schedule.start(deployment, current_round(module.trainer))


def check_sums(federation: Federation) -> None:
    """Raise ValueError if a method's sums over an experience could mix clients in different experiences."""
    plan, participation = federation.stream.plan, federation.participation
    methods = [method for method in federation.methods if overrides_hook(method, "contribute_experience")]
    if methods and not participation.is_full and len({*plan.experiences.values()}) > 1:
        settings = {"swarm": participation.swarm, "synchronization": participation.synchronization}
        argument, value = next(
            ((name, setting) for name, setting in settings.items() if setting is not None),
            ("participation", participation.fraction_or_count),
        )
        is_share = argument == "participation"
        raise InvalidValueError(
            f"Expected {'`participation=1.0`' if is_share else f'no `{argument}`'} for `{type(methods[0]).__name__}`, "
            "because the clients of the stream enter experiences in different rounds, but got "
            f"{value if is_share else type(value).__name__}.",
            hint=f"{'Use `participation=1.0`' if is_share else f'Remove `{argument}`'}, or use a scenario in which all "
            "clients enter each experience in the same round.",
            argument=argument,
            value=value,
        )


def message_nbytes(
    state: State, reductions: Mapping[str, Reduction], codec: UpdateCodec | None, trainable: Collection[str]
) -> tuple[int, int]:
    """Return the number of bytes that a client downloads in a round, and the number of bytes that the client uploads.

    The numbers are estimates, because some sizes are only known after training.

    A tensor with the reduction ``sparse_mean`` is sent in part, but all of its values are counted. The numbers are
    therefore the same after a resume.

    Args:
        state: The tensors by name.
        reductions: The reduction of each tensor.
        codec: Codec that encodes the updates of the ``trainable`` tensors. None: the updates are not encoded.
        trainable: Names of the trainable parameters.

    Example:
        >>> import torch
        >>> from lightning_fcl.federation.reductions import Mean, Local
        >>> message_nbytes({"w": torch.zeros(3), "head": torch.zeros(5)}, {"w": Mean(), "head": Local()}, None, ["w"])
        (12, 12)
    """
    download_nbytes = sum(value.nbytes for name, value in state.items() if reductions[name].is_downloaded)
    upload_nbytes = 0
    for name, value in state.items():
        if reductions[name].is_uploaded:
            nbytes = codec.nbytes(value.numel(), value.element_size()) if codec and name in trainable else value.nbytes
            upload_nbytes += min(nbytes, value.nbytes)
    return download_nbytes, upload_nbytes


def record_time(federation: Federation, number: int) -> None:
    """Record late clients, staleness and duration of a round, if there is a simulated clock."""
    schedule, record = federation.participation.synchronization, federation.server.record
    if schedule is None:
        return
    timed = schedule.round_timing(number)
    record.staleness, record.simulated_seconds = dict(timed.staleness), timed.duration_s
    record.late_clients = list(timed.late_clients)
    for client in timed.late_clients:  # Late clients downloaded the server's state, but their upload is too late.
        record.add_download_bytes(client, schedule.context.download_bytes)


def check_usable(federation: Federation, number: int) -> None:
    """Raise ValueError if ``on_empty_round`` is "stop" and a round has only dropped uploads.

    Clients that miss the synchronization, and late clients, are not dropped. A round with such clients does not raise.
    """
    record = federation.server.record
    dropped = record.dropped
    if (
        federation.settings.stops_unusable
        and dropped
        and not (record.accepted or record.missed_sync or record.late_clients)
    ):
        description = format_names((f"client {client} ({why})" for client, why in dropped.items()), max_names=3)
        raise InvalidValueError(
            f"Expected at least one usable upload in round {number}, but all uploads were dropped: {description}.",
            hint=f'{DIVERGENCE_HINT} To continue with the unchanged server state, set `on_empty_round="warn"`.',
            argument="on_empty_round",
            value=dropped,
        )
