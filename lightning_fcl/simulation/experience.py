"""The end of a client's experience: method state for later experiences, and contributions to sums at the server."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_fcl.data.batches import number_of
from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import (
    PROGRESS,
    RESULT,
    SENDING,
    SENT,
    WITHIN,
    ClientState,
    Memory,
    has_result,
    own_entries,
    trained_rounds,
    with_progress,
)
from lightning_fcl.federation.schedule import Participation
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Declaration, client_of, overrides, remembers, tracks_rounds
from lightning_fcl.methods.experience import noted

if TYPE_CHECKING:
    from lightning_fcl.simulation.cohort import Cohort
    from lightning_fcl.simulation.federation import Federation


def next_round(stream: FederatedStream, part: ClientRound, rounds: int) -> int | None:
    """Return the client's next round of the same experience, of the first ``rounds``; None if there is none."""
    plan, client = stream.plan, part.client
    for number in range(part.round + 1, min(rounds, plan.rounds)):
        if plan.experiences[client][number] != part.experience:
            return None
        if len(plan.train[number].get(client, ())) >= stream.min_batch_size:
            return number
    return None


def returns(
    stream: FederatedStream, participation: Participation, part: ClientRound, rounds: int, accumulates: bool
) -> bool:
    """Return whether a client's next round is sure to replace what its current round would give.

    Args:
        stream: The stream.
        participation: Who trains: only full participation is sure.
        part: The client's part in the current round.
        rounds: Number of rounds of the fit.
        accumulates: Whether each sample counts, so that the next round must have the same samples.
    """
    if not participation.is_full:
        return False
    after = next_round(stream, part, rounds)
    return after is not None and not (accumulates and not stream.has_same_samples(part.client, part.round, after))


def result_of(method: Declaration, client: Client, own: State, data: Any, earlier: Memory) -> Memory:
    """Return the method's result for the experience.

    Args:
        method: The method.
        client: The client after its local training.
        own: The client's state after it.
        data: The samples of the round.
        earlier: The result of the experience's earlier rounds, {} if there is none.
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


def history_of(stream: FederatedStream, part: ClientRound, kept: ClientState) -> SampleHistory:
    """Return the numbers of a client's samples, from the rounds that it has trained in."""
    return stream.sample_history(part.client, part.round, trained_rounds(kept))


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


def finish_experience(federation: Federation, part: ClientRound, kept: ClientState, own: State) -> ClientState | None:
    """Return a client's state with the results that a later round of the experience was to give, but did not.

    With full participation a result is computed once. If the client's last upload is dropped, or the fit is stopped
    within the experience, the result is that of the state which the client has then.

    Args:
        federation: The federation.
        part: The client's part in the latest round.
        kept: What the client keeps.
        own: The state that the client has.

    Returns:
        The new state; None if nothing is missing.
    """
    if PROGRESS not in kept or int(kept[PROGRESS]["experience"]) != part.experience:
        return None
    missing = [
        method
        for method in federation.methods
        if overrides(method, "end_experience") and remembers(method, part) and not has_result(kept, method.section)
    ]
    if not missing:
        return None
    found = {**kept, PROGRESS: {**kept[PROGRESS]}}
    data = (
        federation.stream.client_samples(part.client, part.round, federation.seed)
        if any(method.needs.samples for method in missing)
        else None
    )
    for method in missing:
        memory = kept.get(method.section, {})
        client = client_of(method, federation.module, memory, own, part)
        client.set_history(partial(history_of, federation.stream, part, kept))
        result = result_of(method, client, own, data if method.needs.samples else None, {})
        found |= sections_of(method, memory, result, None, kept)
        note_result(found, method.section)
    return found


def finish_stopped(federation: Federation, rounds: int) -> None:
    """End the experiences of clients of a fit that was stopped after ``rounds`` rounds, before its last one."""
    store, device = federation.server.store, federation.module.device
    for client in federation.stream.plan.clients:
        kept = store[client] if federation.hosts(client) else {}
        trained = [number for number in trained_rounds(kept) if number < rounds]
        if trained:
            part = federation.stream.client_round(client, trained[-1])
            if next_round(federation.stream, part, federation.stream.plan.rounds) is None:
                continue
            own = {**entries(federation.module), **own_entries(kept, device)}
            if (found := finish_experience(federation, part, kept, own)) is not None:
                store[client] = found


class ExperienceEnds:
    """Computes the client state and the uploads of clients whose experience may end with the round.

    Args:
        federation: The federation.
        looks_ahead: Whether a result is left to the client's next round if that is sure to come.
    """

    def __init__(self, federation: Federation, looks_ahead: bool) -> None:
        self._federation, self._looks_ahead = federation, looks_ahead
        self._shares: dict[tuple[str, str], Memory] = {}  # by client and method: see `share_of`

    @cached_property
    def _stream(self) -> FederatedStream:
        return self._federation.stream

    @cached_property
    def _tracks(self) -> bool:
        """Whether a method needs to know in which rounds clients train."""
        return any(map(tracks_rounds, self._federation.methods))

    @cached_property
    def _computes(self) -> dict[str, tuple[bool, bool]]:
        """Whether each method computes something when a round ends, and when an experience ends, by section."""
        return {
            method.section: (overrides(method, "end_round"), overrides(method, "end_experience"))
            for method in self._federation.methods
        }

    def share(self, cohort: Cohort, method: Declaration, row: int, client: Client, state: State) -> State:
        """Return what a client uploads to the sums of its experience."""
        part = cohort.clients[row]
        rounds = self._stream.plan.rounds  # the same for a fit that ends earlier and is resumed
        if returns(self._stream, self._federation.participation, part, rounds, accumulates=True):
            return {}
        earlier = cohort.entered[row].get(method.section + SENT, {})
        found = share_of(method, client, state, cohort.data(method, row), earlier)
        if found is None:
            return {}
        if next_round(self._stream, part, rounds) is not None:
            self._shares[part.client, method.section] = found[1]
        return found[0]

    def sections(
        self, cohort: Cohort, method: Declaration, row: int, memory: Memory, state: State, missed: bool
    ) -> ClientState:
        """Return the sections that a client keeps for a method after its local training."""
        part, result = cohort.clients[row], None
        at_round, at_experience = self._computes[method.section]
        may_end = (at_round or at_experience) and not self._returns(part, method.accumulates)
        ends = may_end and at_experience
        if at_round or ends:
            client, data = cohort.ended(method, row, memory), cohort.data(method, row)
            client.missed, client.may_end = missed, may_end
        if at_round:
            client.memory = memory = noted(method, client, method.end_round(client, state, data))
        if ends:
            earlier = cohort.kept[row][method.section] if has_result(cohort.kept[row], method.section) else {}
            result = result_of(method, client, state, data, earlier)
            if next_round(self._stream, part, self._stream.plan.rounds) is None:
                return {method.section: result}
        share = self._shares.pop((part.client, method.section), None)
        return sections_of(method, memory, result, share, cohort.entered[row])

    def _returns(self, part: ClientRound, accumulates: bool) -> bool:
        """Return whether the client's next round is sure to replace a result for the experience."""
        if not self._looks_ahead:
            return False
        rounds = self._federation.module.trainer.max_epochs or 0
        return returns(self._stream, self._federation.participation, part, rounds, accumulates)

    def note_progress(self, cohort: Cohort, row: int, kept: ClientState) -> None:
        """Note in a client's new state that it has trained in the round, if a method needs to know."""
        if not self._tracks:
            return
        part = cohort.clients[row]
        kept[PROGRESS] = with_progress(cohort.kept[row], part.round, part.experience)
        for section in self._computes:
            if section + WITHIN in kept:
                note_result(kept, section)

    def keep_dropped(self, cohort: Cohort, row: int) -> None:
        """Let a client whose upload is dropped keep the experience, if a result was left to this round."""
        federation, part = self._federation, cohort.clients[row]
        rounds = federation.module.trainer.max_epochs or 0
        if self._looks_ahead and next_round(federation.stream, part, rounds) is None:
            found = finish_experience(federation, part, cohort.kept[row], cohort.received[row])
            if found is not None:
                federation.server.store[part.client] = found
