"""Copies of the server's model from the start of experiences. They are teachers for distillation in later rounds.

The server copies its model at the start of the round in which the first client enters an experience. The server stores
one copy for all clients while any client is in the experience. A client receives the copy once and keeps it.
"""

from __future__ import annotations

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.scenarios.base import Plan
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.federation.aggregation import State, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.reductions import DownloadOnly
from lightning_fcl.methods.context import Client, strip_prefix, with_prefix
from lightning_fcl.methods.drift_correction import active_reductions
from lightning_fcl.methods.functional import trainable_parameters


class Once(DownloadOnly):
    """The reduction of entries that clients receive once and keep."""

    name = "once"
    once = True


def present_experiences(module: L.LightningModule, fits: int, round_offset: int = 0) -> tuple[int, ...]:
    """Return the indices of the experiences that clients have in a round, in ascending order.

    Without a `FederatedStream`, an experience is a fit. The result then contains only ``fits``.

    Args:
        module: The module.
        fits: Number of earlier fits.
        round_offset: Number of rounds from the current round to this round, at least 0.
    """
    stream = find_stream(module.trainer)
    return (fits,) if stream is None else stream.plan.current_experiences(_round(module, stream.plan, round_offset))


def old_classes(module: L.LightningModule, round_offset: int = 0) -> tuple[int, ...]:
    """Return the old classes of a round, which are the classes of earlier experiences.

    Always empty without a `FederatedStream`.

    Args:
        module: The module.
        round_offset: Number of rounds from the current round to this round, at least 0.
    """
    stream = find_stream(module.trainer)
    return () if stream is None else stream.plan.class_split(_round(module, stream.plan, round_offset))[1]


def _round(module: L.LightningModule, plan: Plan, round_offset: int = 0) -> int:
    """Return the number of the current or a later round, limited to the last round, because the fit may have ended."""
    return min(current_round(module.trainer) + round_offset, plan.num_rounds - 1)


def models_before(module: L.LightningModule, experiences: tuple[int, ...], state: State | None = None) -> State:
    """Return the server's model as entries of `MethodBase.init_server_state`, for each experience except the first.

    The entries are ``before.<experience>.<name>`` with the reduction `Once`. The server keeps the values that an entry
    has in the first round in which it exists. Frozen parameters and entries that clients do not download are not
    included.

    Args:
        module: The module with the server's model.
        experiences: The indices of the experiences, from 0.
        state: The model. Default: the model in the module.
    """
    later_experiences = [number for number in experiences if number > 0]
    if not later_experiences:
        return {}
    reductions, learning = active_reductions(module), trainable_parameters(module)
    frozen = {name for name, _ in module.named_parameters()} - learning.keys()
    model_state = {
        n: value
        for n, value in (state or state_tensors(module)).items()
        if n not in frozen and reductions[n].is_downloaded
    }
    return {
        f"before.{number}.{name}": value.detach() for number in later_experiences for name, value in model_state.items()
    }


def with_teacher(client: Client, experience: int) -> StateSection:
    """Return the client state with ``teacher.<name>``: the server's model from the start of an experience.

    Client-local entries of the teacher are the client's own values from its first round of the current experience. For
    entries that the teacher lacks, the received values are used.
    """
    federation, previous_models, local_state = (
        client.federation,
        strip_prefix(client.server_state, "before"),
        dict[str, Tensor](),
    )
    if federation is not None:
        local = (name for name, reduction in federation.server.reductions.items() if reduction.is_local)
        local_state = {
            n: client.received_state[n]
            for n in local
            if f"teacher.{n}" not in client.method_state and n in client.received_state
        }
    names = {name.split(".", 1)[1] for name in previous_models}
    teacher = {
        f"teacher.{name}": previous_models.get(f"{experience}.{name}", client.received_state[name])
        for name in sorted(names)
    }
    return client.method_state | with_prefix(local_state, "teacher") | teacher


def without_teacher(client: Client) -> StateSection:
    """Return the client state without the teacher entries that the server stores."""
    names = {f"teacher.{name.split('.', 1)[1]}" for name in strip_prefix(client.server_state, "before")}
    return {name: value for name, value in client.method_state.items() if name not in names}
