"""Method state that belongs to one experience, and results that methods compute at the end of an experience.

`MethodBase.of_experience` lists the entries of a method's state that belong to one experience. In the client state,
these entries are removed when the client enters a new experience. On the server, they are reset to the values of
`MethodBase.init_server_state` in the round in which all clients enter an experience.

In some scenarios, such as `lightning_fcl.data.scenarios.Delayed`, clients enter an experience in different rounds. The
server then does not reset these entries. If `MethodBase.init_server_state` returns such entries, the method must
override `MethodBase.enters_alone`. Otherwise, setup raises ValueError.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch

from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.collation import count_nested_samples
from lightning_fcl.data.loader_stream import ClientStream
from lightning_fcl.data.scenarios.base import Plan
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, assign_reductions
from lightning_fcl.federation.client_store import (
    PROGRESS,
    RESULT,
    SENDING,
    SENT,
    WITHIN,
    ClientState,
    StateSection,
    trained_rounds,
)
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.methods.base import MethodBase, matches, overrides_hook
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.hook_results import check_tensors


def receive(method: MethodBase, client: Client) -> StateSection:
    """Return the client state with which a client starts a round. See `MethodBase.prepare_client_state`.

    If the client enters a new experience, the entries that belong to an earlier experience are removed first.
    """
    if method.of_experience and client.is_new_experience:
        client.method_state = lasting(method, client.method_state)
        if not client.client_round.in_step:
            check_tensors(method, "enters_alone", tensors := method.enters_alone(client))
            client.method_state |= tensors
    return noted(method, client, "prepare_client_state", method.prepare_client_state(client))


def noted(method: MethodBase, client: Client, hook: str, memory: StateSection) -> StateSection:
    """Return the client state with an entry ``experience`` if the method has entries that belong to one experience.

    The entry contains the index of the client's current experience. An empty client state stays empty.

    Args:
        method: The method.
        client: The client.
        hook: Name of the hook that returned the client state.
        memory: The client state.

    Raises:
        TypeError: If the client state is not a dict of tensors.
    """
    check_tensors(method, hook, memory)
    noting = method.of_experience and memory
    return {**memory, "experience": torch.tensor(client.client_round.experience_idx)} if noting else memory


def lasting(method: MethodBase, state: State) -> State:
    """Return the entries of a client state or server state that do not belong to one experience."""
    return {name: value for name, value in state.items() if not matches(name, method.of_experience)}


def declared(method: MethodBase, server_state: State) -> dict[str, Reduction]:
    """Return the reduction of each entry of a method's server state in the current round.

    Patterns of a `once` reduction that match no entry are skipped, because such entries do not exist in every round.
    """
    rules = {
        pattern: reduction
        for pattern, reduction in method.reductions.items()
        if isinstance(reduction, str) or not reduction.once or any(matches(name, pattern) for name in server_state)
    }
    return assign_reductions(server_state, rules) if server_state else {}


def begins_experience(plan: Plan, round_idx: int) -> bool:
    """Return whether all clients enter an experience in this round, and the round is not the first."""
    if not plan.in_step or round_idx == 0:
        return False
    return plan.current_experiences(round_idx) != plan.current_experiences(round_idx - 1)


def check_in_step(method: MethodBase, module: L.LightningModule) -> None:
    """Raise ValueError if clients enter experiences in different rounds and the method does not support it."""
    stream = find_stream(module.trainer)
    if stream is None or stream.plan.in_step or not method.of_experience or overrides_hook(method, "enters_alone"):
        return
    server_state = method.init_server_state(module)
    if len(lasting(method, server_state)) < len(server_state):
        raise InvalidValueError(
            "Expected all clients to enter each experience in the same round, because "
            f"`{type(method).__name__}` resets its server state in each experience, but the clients of this stream "
            "enter an experience in different rounds.",
            hint="Use a scenario in which all clients enter each experience in the same round, such as "
            "`ClassIncremental`, or use `SCAFFOLD`.",
            argument="scenario",
        )


def next_round(stream: ClientStream, client_round: ClientRound, rounds: int) -> int | None:
    """Return the client's next round of the same experience with enough samples for training, or None.

    Only the first ``rounds`` rounds of the stream are searched.
    """
    plan, client = stream.plan, client_round.client_id
    for number in range(client_round.round_idx + 1, min(rounds, plan.num_rounds)):
        if plan.experiences[client][number] != client_round.experience_idx:
            return None
        if len(plan.train[number].get(client, ())) >= stream.min_batch_size:
            return number
    return None


def returns(stream: ClientStream, client_round: ClientRound, rounds: int, accumulates: bool) -> bool:
    """Return whether a later round will replace the result of `MethodBase.end_experience` from the current round.

    The function assumes that the client trains in every round.

    Args:
        stream: The stream.
        client_round: The client's current round.
        rounds: Number of rounds of the fit.
        accumulates: Whether the method counts each sample once. In this case, the function returns True only if the
            client's next round has the same samples.
    """
    next_round_idx = next_round(stream, client_round, rounds)
    return next_round_idx is not None and not (
        accumulates and not stream.has_same_samples(client_round.client_id, client_round.round_idx, next_round_idx)
    )


def result_of(
    method: MethodBase, client: Client, trained_state: State, data: Any, earlier: StateSection
) -> StateSection:
    """Return the client state that `MethodBase.end_experience` computes for the current experience.

    Args:
        method: The method.
        client: The client after local training.
        trained_state: The client's state after local training.
        data: The samples of the round.
        earlier: The result of this function in earlier rounds of the experience, or {}.
    """
    history = client.history
    if method.accumulates and history is not None:
        covers = history.covers_experience
        client.result = {} if covers else earlier
        data = client.select_samples(data, history.new_in_experience if covers else history.new)
    return noted(method, client, "end_experience", method.end_experience(client, trained_state, data))


def share_of(
    method: MethodBase, client: Client, trained_state: State, data: Any, earlier: StateSection
) -> tuple[State, StateSection] | None:
    """Return a client's upload for the sums of an experience, and the total contribution including this upload.

    Args:
        method: The method.
        client: The client after local training.
        trained_state: The client's state after local training.
        data: The samples of the round, or None if the method does not need samples.
        earlier: The client's total contribution in earlier rounds of the experience, or {}.

    Returns:
        The upload and the total contribution, or None if the round has no samples that the contribution must count.
    """
    history = client.history
    covers = data is None or history is None or history.covers_experience
    if data is not None and history is not None:
        data = client.select_samples(data, history.new_in_experience if covers else history.new)
        if not count_nested_samples(data):
            return None
    value = method.contribute_experience(client, trained_state, data)
    check_tensors(method, "contribute_experience", value)
    if not earlier:
        return value, value
    if covers:
        return {name: new - earlier[name].to(new.device) for name, new in value.items()}, value
    return value, {name: new + earlier[name].to(new.device) for name, new in value.items()}


def sections_of(
    method: MethodBase,
    memory: StateSection,
    result: StateSection | None,
    share: StateSection | None,
    previous_state: ClientState,
) -> ClientState:
    """Return the sections of a client's state that belong to a method.

    Args:
        method: The method.
        memory: The method's client state after the round, without the result of `MethodBase.end_experience`.
        result: The client state that `MethodBase.end_experience` returned, or None if the hook was not called.
        share: The client's total contribution to the experience's sums, including the upload of this round. None if
            there is no upload, or if the client has no later round in the experience.
        previous_state: The client's state at the start of the round.
    """
    section = method.section_name
    sections: ClientState = {section: memory}
    if result is not None:
        sections = {section: result, section + WITHIN: memory}
    if (previous_share := previous_state.get(section + SENT)) is not None:
        sections[section + SENT] = previous_share
    if share is not None:
        sections[section + SENDING] = {name: value.detach().clone() for name, value in share.items()}
    return sections


def note_result(client_state: ClientState, section: str) -> None:
    """Record in the client state that a method's section contains the result of `MethodBase.end_experience`."""
    client_state[PROGRESS][RESULT + section] = torch.tensor(True)


def history_of(stream: ClientStream, client_round: ClientRound, client_state: ClientState) -> SampleHistory | None:
    """Return the sample numbers of the current round and of earlier rounds, or None if the samples have no numbers.

    Only the earlier rounds in which the client trained are included.
    """
    return stream.sample_history(client_round.client_id, client_round.round_idx, trained_rounds(client_state))
