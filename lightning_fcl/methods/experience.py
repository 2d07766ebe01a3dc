"""Entries of one experience: when they start anew, and the server's models at the start of experiences.

A method declares in `Declaration.of_experience` which of its entries belong to one experience. In client state these
entries start anew when the client enters an experience. On the server they start anew, with their values in
`Declaration.server_state`, in the round in which all clients enter an experience. If clients enter an experience in
different rounds, as in `lightning_fcl.data.scenarios.Staggered`, the entries of the server last: a method handles each
client by itself in `Declaration.enters_alone`, or it is rejected.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.batches import number_of
from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.loader_stream import ClientStream
from lightning_fcl.data.scenarios.scenario import Plan
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, declare
from lightning_fcl.federation.client_store import (
    PROGRESS,
    RESULT,
    SENDING,
    SENT,
    WITHIN,
    ClientState,
    Memory,
    trained_rounds,
)
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


def next_round(stream: ClientStream, part: ClientRound, rounds: int) -> int | None:
    """Return the client's next round of the same experience, of the first ``rounds``; None if there is none."""
    plan, client = stream.plan, part.client
    for number in range(part.round + 1, min(rounds, plan.rounds)):
        if plan.experiences[client][number] != part.experience:
            return None
        if len(plan.train[number].get(client, ())) >= stream.min_batch_size:
            return number
    return None


def returns(stream: ClientStream, part: ClientRound, rounds: int, accumulates: bool) -> bool:
    """Return whether the next round of a client that always trains replaces what its current round would give.

    Args:
        stream: The stream.
        part: The client's part in the current round.
        rounds: Number of rounds of the fit.
        accumulates: Whether each sample counts, so that the next round must have the same samples.
    """
    after = next_round(stream, part, rounds)
    return after is not None and not (accumulates and not stream.has_same_samples(part.client, part.round, after))


def result_of(method: Declaration, client: Client, own: State, data: Any, earlier: Memory) -> Memory:
    """Return the method's result for the experience.

    Args:
        method: The method.
        client: The client after its local training.
        own: The client's state after it.
        data: The samples of the round.
        earlier: The result of the experience's earlier rounds. {} if there is none.
    """
    history = client.history
    if method.accumulates and history is not None:
        covers = history.covers_experience
        client.result = {} if covers else earlier
        data = client.selected(data, history.new_in_experience if covers else history.new)
    return noted(method, client, method.end_experience(client, own, data))


def share_of(
    method: Declaration, client: Client, own: State, data: Any, earlier: Memory
) -> tuple[State, Memory] | None:
    """Return what a client uploads to an experience's sums, and all that it has contributed to them then.

    Args:
        method: The method.
        client: The client after its local training.
        own: The client's state after it.
        data: The samples of the round; None if the method does not need them.
        earlier: What the client has contributed in earlier rounds of the experience.
    """
    history = client.history
    covers = data is None or history is None or history.covers_experience
    if data is not None and history is not None:
        data = client.selected(data, history.new_in_experience if covers else history.new)
        if not number_of(data):
            return None
    value = method.contribute_experience(client, own, data)
    if not earlier:
        return value, value
    if covers:
        return {name: new - earlier[name].to(new.device) for name, new in value.items()}, value
    return value, {name: new + earlier[name].to(new.device) for name, new in value.items()}


def sections_of(
    method: Declaration, memory: Memory, result: Memory | None, share: Memory | None, before: ClientState
) -> ClientState:
    """Return the sections of a client's state that belong to a method.

    Args:
        method: The method.
        memory: What `Declaration.end_round` returned.
        result: The result for the experience; None if none was computed.
        share: All that the client has contributed to the experience's sums with the latest upload; None if nothing.
        before: The client's state at the start of the round.
    """
    section = method.section
    sections: ClientState = {section: memory}
    if result is not None:
        sections = {section: result, section + WITHIN: memory}
    if (sent := before.get(section + SENT)) is not None:
        sections[section + SENT] = sent
    if share is not None:
        sections[section + SENDING] = {name: value.detach().clone() for name, value in share.items()}
    return sections


def note_result(kept: ClientState, section: str) -> None:
    """Note that a method's section has the result for the experience."""
    kept[PROGRESS][RESULT + section] = torch.tensor(True)


def history_of(stream: ClientStream, part: ClientRound, kept: ClientState) -> SampleHistory | None:
    """Return the numbers of a client's samples, from the rounds that it has trained in. None: samples have none."""
    return stream.sample_history(part.client, part.round, trained_rounds(kept))
