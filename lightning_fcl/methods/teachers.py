"""Server models from the start of experiences, from which methods distill in later rounds of the experiences.

The server keeps its model from the start of the round in which the first client enters an experience. The server keeps
one copy for all clients, while any client is in the experience. A client receives the copy once, and keeps it.
"""

from __future__ import annotations

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.client_round import current_round
from lightning_fcl.data.scenarios.scenario import Plan
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.reductions import Download
from lightning_fcl.methods.averaging import reductions_in_use
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.functional import trainable


class Once(Download):
    """The reduction of what clients receive once and keep."""

    name = "once"
    once = True


def present_experiences(module: L.LightningModule, fits: int, later: int = 0) -> tuple[int, ...]:
    """Return the experiences that clients are in, ascending, in this round or some rounds later.

    Without a `FederatedStream` an experience is a fit, and ``fits`` is the number of earlier fits.
    """
    stream = stream_of(module.trainer)
    return (fits,) if stream is None else stream.plan.present(_round(module, stream.plan, later))


def has_old_classes(module: L.LightningModule) -> bool:
    """Return whether clients have had classes of earlier experiences, as far as a `FederatedStream` tells."""
    stream = stream_of(module.trainer)
    return stream is not None and bool(stream.plan.classes(_round(module, stream.plan))[1])


def _round(module: L.LightningModule, plan: Plan, later: int = 0) -> int:
    """Return the current round or a later one, which is the last at most: the fit may have ended."""
    return min(current_round(module.trainer) + later, plan.rounds - 1)


def models_before(module: L.LightningModule, experiences: tuple[int, ...], state: State | None = None) -> State:
    """Return the server's model as entries of `Declaration.server_state`, once for each experience but the first.

    The entries are ``before.<experience>.<name>``, of the reduction `Once`. The server keeps the values of the first
    round that has them. Left out is what clients do not download, and what is frozen.

    Args:
        module: The module with the server's model.
        experiences: The numbers of the experiences.
        state: The model. Default: the model in the module.
    """
    later = [number for number in experiences if number > 0]
    if not later:
        return {}
    reductions, learning = reductions_in_use(module), trainable(module)
    frozen = {name for name, _ in module.named_parameters()} - learning.keys()
    own = {n: value for n, value in (state or entries(module)).items() if n not in frozen and reductions[n].down}
    return {f"before.{number}.{name}": value.detach() for number in later for name, value in own.items()}


def with_teacher(client: Client, experience: int) -> Memory:
    """Return the memory of a client with ``teacher.<name>``: the server's model from the start of an experience.

    Client-local entries of the teacher are the client's own, from its first round in its experience. Entries that the
    teacher lacks are those that the client has received.
    """
    federation, kept, own = client.federation, section(client.shared, "before"), dict[str, Tensor]()
    if federation is not None:
        local = (name for name, reduction in federation.server.reductions.items() if reduction.own)
        own = {n: client.server[n] for n in local if f"teacher.{n}" not in client.memory and n in client.server}
    names = {name.split(".", 1)[1] for name in kept}
    teacher = {f"teacher.{name}": kept.get(f"{experience}.{name}", client.server[name]) for name in sorted(names)}
    return client.memory | remember(own, "teacher") | teacher


def without_teacher(client: Client) -> Memory:
    """Return the memory of a client without what the server keeps of the teacher."""
    names = {f"teacher.{name.split('.', 1)[1]}" for name in section(client.shared, "before")}
    return {name: value for name, value in client.memory.items() if name not in names}
