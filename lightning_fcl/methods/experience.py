"""Entries of one experience: when they start anew, and the server's models at the start of experiences.

A method declares in `Declaration.of_experience` which of its entries belong to one experience. In client state these
entries start anew when the client enters an experience. On the server they start anew, with their values in
`Declaration.server_state`, in the round in which all clients enter an experience. If clients enter an experience in
different rounds, as in `lightning_fcl.data.scenarios.Staggered`, the entries of the server last: a method handles each
client by itself in `Declaration.enters_alone`, or it is rejected.
"""

from __future__ import annotations

import lightning.pytorch as L
import torch

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.scenarios.scenario import Plan
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, declare
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Declaration, matches, overrides


def receive(method: Declaration, client: Client) -> Memory:
    """Return the client state with which a client starts a round, see `Declaration.on_download`.

    If the client enters an experience, its entries of earlier experiences are removed first.
    """
    if not method.of_experience:
        return method.on_download(client)
    if client.enters_experience:
        client.memory = lasting(method, client.memory)
        if not client.part.in_step:
            client.memory |= method.enters_alone(client)
    return noted(method, client, method.on_download(client))


def noted(method: Declaration, client: Client, memory: Memory) -> Memory:
    """Return a client state, if there is any, with the experience to which its entries of one experience belong."""
    noting = method.of_experience and memory
    return {**memory, "experience": torch.tensor(client.part.experience)} if noting else memory


def lasting(method: Declaration, kept: State) -> State:
    """Return the entries of client state or of the server that do not belong to one experience."""
    return {name: value for name, value in kept.items() if not matches(name, method.of_experience)}


def declared(method: Declaration, kept: State) -> dict[str, Reduction]:
    """Return the reductions of what the server keeps for a method in a round.

    Entries that clients receive once are not there in each round.
    """
    rules = {
        pattern: reduction
        for pattern, reduction in method.reductions.items()
        if isinstance(reduction, str) or not reduction.once or any(matches(name, pattern) for name in kept)
    }
    return declare(kept, rules) if kept else {}


def begins_experience(plan: Plan, round: int) -> bool:
    """Return whether all clients enter an experience in a round other than the first."""
    return plan.in_step and round > 0 and plan.present(round) != plan.present(round - 1)


def check_in_step(method: Declaration, module: L.LightningModule) -> None:
    """Raise ValueError if clients enter experiences in different rounds and the method does not handle it."""
    stream = stream_of(module.trainer)
    if stream is None or stream.plan.in_step or not method.of_experience or overrides(method, "enters_alone"):
        return
    kept = method.server_state(module)
    if len(lasting(method, kept)) < len(kept):
        raise InvalidValueError(
            f"Expected a stream whose clients enter each experience in the same round for `{type(method).__name__}`, "
            "whose server state starts anew with each experience, but got clients that enter experiences in different "
            "rounds.",
            hint="Use a scenario other than `Staggered`, or `SCAFFOLD`.",
            argument="scenario",
        )
