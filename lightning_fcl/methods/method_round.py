"""Calls of the methods' hooks in one round, for each client and for the server.

A federation and a plain Trainer both use this module. A plain Trainer is a federation of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.loader_stream import ClientStream
from lightning_fcl.federation.aggregation import State, state_tensors
from lightning_fcl.federation.client_store import (
    PROGRESS,
    SENT,
    WITHIN,
    ClientState,
    StateSection,
    enter_round,
    has_result,
    local_tensors,
    trained_rounds,
    with_progress,
)
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import ExtraTensors, FederatedServer
from lightning_fcl.federation.uploads import Messages
from lightning_fcl.methods.base import MethodBase, keeps_client_state, make_client, overrides_hook, tracks_rounds
from lightning_fcl.methods.context import Client, Server
from lightning_fcl.methods.experience import (
    begins_experience,
    declared,
    history_of,
    lasting,
    next_round,
    note_result,
    noted,
    receive,
    result_of,
    returns,
    sections_of,
    share_of,
)
from lightning_fcl.methods.functional import select_tensors
from lightning_fcl.methods.hook_results import check_shapes, check_tensors, check_transformed
from lightning_fcl.rng import derive_seed


@dataclass(eq=False)
class LocalRound:
    """The values of one client in a round after the client's local training.

    Args:
        part: The client's `ClientRound`.
        received: The state that the client started from.
        kept: The client's stored state from earlier rounds.
        entered: The state that `enter_round` returned for ``kept``, with which the client starts the round.
        steps: Number of optimizer steps.
        state: The client's model state after local training.
        memories: The client state of each method after local training.
        samples: A function that returns the client's samples of the round, stacked.
    """

    part: ClientRound
    received: State
    kept: ClientState
    entered: ClientState
    steps: int
    state: State
    memories: Sequence[StateSection]
    samples: Callable[[], Any]

    def data(self, method: MethodBase) -> Any:
        """Return the samples of the round, or None if the method does not need them."""
        return self.samples() if method.needs.round_samples else None


@dataclass(eq=False)
class MethodRound:
    """The calls of the methods' hooks in one round, for each client and for the server.

    Args:
        number: Number of the round, from 0.
        module: The module that the Trainer trains.
        methods: The methods among the Trainer's callbacks.
        stream: The stream.
        server: The server, which stores the state of the clients and of the methods.
        seed: Seed of the random numbers that methods use.
        is_full: Whether all clients train in every round.
        looks_ahead: Whether to skip `MethodBase.end_experience` if the client's next round is certain to replace the
            result. Has an effect only if ``is_full`` is True.
    """

    number: int
    module: L.LightningModule
    methods: Sequence[MethodBase]
    stream: ClientStream
    server: FederatedServer
    seed: int
    is_full: bool = True
    looks_ahead: bool = True
    # Each client's contribution to the sums of its experience, by client and method.
    _shares: dict[tuple[str, str], StateSection] = field(init=False, default_factory=dict)

    @property
    def _rounds(self) -> int:
        """Number of rounds of the fit."""
        epochs = self.module.trainer.max_epochs
        return self.stream.plan.num_rounds if epochs in (None, -1) else epochs or 0

    # Download.

    def server_entries(self) -> ExtraTensors:
        """Return the initial values and the reductions of the methods' server state for the round, by name.

        Entries that the methods no longer declare, or that are reset in this round, are removed from the server.
        """
        extra, begins = server_entries(self.methods, self.module), begins_experience(self.stream.plan, self.number)
        for method in self.methods:
            server_state = self.server.get_section(method.section_name)
            last = lasting(method, server_state) if begins else server_state
            for name in (f"{method.section_name}.{name}" for name in server_state):
                if name not in extra or name.removeprefix(f"{method.section_name}.") not in last:
                    del self.server.extra_tensors[name]
        return extra

    def receive(self, client_round: ClientRound, received_state: State, entered: ClientState) -> list[StateSection]:
        """Return each method's client state at the start of a round.

        Args:
            client_round: The client's `ClientRound`.
            received_state: The state that the client has received.
            entered: The client state at the start of the round. See `enter_round`.
        """
        device, memories = self.module.device, []
        for method in self.methods:
            client = make_client(
                method, self.module, entered.get(method.section_name, {}), received_state, client_round
            )
            self._set_history(method, client, entered)
            if overrides_hook(method, "reply"):
                check_tensors(method, "reply", reply := method.reply(client))
                client.reply = self.server.send(client_round.client_id, reply)
            memories.append(_moved(receive(method, client), device))
        return memories

    def _set_history(self, method: MethodBase, client: Client, client_state: ClientState) -> None:
        if tracks_rounds(method):
            client.set_history(partial(history_of, self.stream, client.client_round, client_state))

    # Upload.

    def ended(self, method: MethodBase, client: LocalRound, memory: StateSection) -> Client:
        """Return the `Client` that a method's hooks receive after local training."""
        method_client = make_client(method, self.module, memory, client.received, client.part)
        method_client.num_steps = client.steps
        self._set_history(method, method_client, client.kept)
        return method_client

    @property
    def uploads(self) -> bool:
        """Whether a method changes the state that clients upload."""
        return any(overrides_hook(method, "transform_upload") for method in self.methods)

    def upload(self, client: LocalRound) -> State:
        """Return the state that a client uploads, after the changes by the methods' `transform_upload`."""
        state = client.state
        for method, memory in zip(self.methods, client.memories, strict=True):
            if overrides_hook(method, "transform_upload") and method.applies_to(client.part):
                transformed_state = method.transform_upload(self.ended(method, client, memory), state)
                check_transformed(method, transformed_state, state)
                state = transformed_state
        return state

    def contribute(self, client: LocalRound) -> State:
        """Return a client's uploads for the methods' server state, each with the shape of the server's tensor."""
        upload = self._nothing
        for method, memory in zip(self.methods, client.memories, strict=True):
            receives = any(name.startswith(f"{method.section_name}.") for name in self._nothing)
            if not (receives and method.applies_to(client.part)):
                continue
            method_client = self.ended(method, client, memory)
            trained_state = _lasting(client.state, client.received, self.server.reductions)
            statistics = method.upload_statistics(method_client, trained_state, client.data(method))
            declared_state = self.server.get_section(method.section_name)
            check_shapes(method, "upload_statistics", statistics, declared_state, "`init_server_state`")
            if overrides_hook(method, "contribute_experience"):
                contribution = self._experience_contribution(method, client, method_client, trained_state)
                check_shapes(method, "contribute_experience", contribution, declared_state, "`init_server_state`")
                statistics = {**statistics, **contribution}
            if statistics:
                upload = {
                    **upload,
                    **{f"{method.section_name}.{n}": v.to(self.module.device) for n, v in statistics.items()},
                }
        return upload

    def messages(self, clients: Sequence[LocalRound]) -> Messages:
        """Return the results of `MethodBase.message`: for each method's section, a list with one dict per client."""
        messages_by_section: dict[str, list[State]] = {}
        for number, method in enumerate(self.methods):
            if overrides_hook(method, "message"):
                messages_by_section[method.section_name] = [
                    self._message(method, client, client.memories[number]) for client in clients
                ]
        return messages_by_section

    def _message(self, method: MethodBase, client: LocalRound, memory: StateSection) -> State:
        if not method.applies_to(client.part):
            return {}
        method_client = self.ended(method, client, memory)
        method_client.may_end = not self._returns(client.part, method.accumulates)
        check_tensors(method, "message", message := method.message(method_client, client.state))
        return message

    @cached_property
    def _nothing(self) -> State:
        """The upload of a client that contributes nothing to the methods' server state."""
        rules, entries = self.server.reductions, self.server.extra_tensors
        return {
            name: rules[name].empty_upload(entries[name])
            for name in entries
            if name in rules and rules[name].is_uploaded
        }

    def _experience_contribution(
        self, method: MethodBase, client: LocalRound, method_client: Client, trained_state: State
    ) -> State:
        """Return a client's upload to the sums of its experience, or {} if the client uploads nothing in this round."""
        client_round = client.part
        # Use the plan's number of rounds: it is the same if a fit ends earlier and is resumed.
        rounds = self.stream.plan.num_rounds
        if self.is_full and returns(self.stream, client_round, rounds, accumulates=True):
            return {}
        earlier = client.entered.get(method.section_name + SENT, {})
        contribution = share_of(method, method_client, trained_state, client.data(method), earlier)
        if contribution is None:
            return {}
        if next_round(self.stream, client_round, rounds) is not None:
            self._shares[client_round.client_id, method.section_name] = contribution[1]
        return contribution[0]

    # End of a client's round.

    def end(self, client: LocalRound, missed_sync: bool = False) -> ClientState:
        """Return the client state of all methods after the client's round.

        Args:
            client: The client after its local training.
            missed_sync: Whether the server has not received the client's upload.
        """
        client_state: ClientState = {}
        for method, memory in zip(self.methods, client.memories, strict=True):
            if keeps_client_state(method, client.part):
                client_state |= self._sections(method, client, memory, missed_sync)
        if any(map(tracks_rounds, self.methods)):
            client_state[PROGRESS] = with_progress(client.kept, client.part.round_idx, client.part.experience_idx)
            for method in self.methods:
                if method.section_name + WITHIN in client_state:
                    note_result(client_state, method.section_name)
        return client_state

    def _sections(self, method: MethodBase, client: LocalRound, memory: StateSection, missed_sync: bool) -> ClientState:
        """Return the sections of a method in the client state after local training."""
        at_round, at_experience = (
            overrides_hook(method, "update_client_state"),
            overrides_hook(method, "end_experience"),
        )
        client_round, state, result = client.part, client.state, None
        may_end = (at_round or at_experience) and not self._returns(client_round, method.accumulates)
        ends = may_end and at_experience
        if at_round or ends:
            method_client, data = self.ended(method, client, memory), client.data(method)
            method_client.missed_sync, method_client.may_end = missed_sync, may_end
        if at_round:
            method_client.method_state = memory = noted(
                method,
                method_client,
                "update_client_state",
                method.update_client_state(method_client, state, data),
            )
        if ends:
            earlier = client.kept.get(method.section_name, {}) if has_result(client.kept, method.section_name) else {}
            result = result_of(method, method_client, state, data, earlier)
            if next_round(self.stream, client_round, self.stream.plan.num_rounds) is None:
                return {method.section_name: result}
        share = self._shares.pop((client_round.client_id, method.section_name), None)
        return sections_of(method, memory, result, share, client.entered)

    def _returns(self, client_round: ClientRound, accumulates: bool) -> bool:
        """Return whether the client's next round is certain to replace a result of `MethodBase.end_experience`."""
        return self.looks_ahead and self.is_full and returns(self.stream, client_round, self._rounds, accumulates)

    def end_dropped(self, client: LocalRound) -> None:
        """Compute and store a client's missing results of `MethodBase.end_experience` if its last upload was dropped.

        With ``looks_ahead``, earlier rounds did not compute the results, because the last round would replace them.
        Without ``looks_ahead``, or before the client's last round of the experience, this function has no effect.
        """
        if self.looks_ahead and next_round(self.stream, client.part, self._rounds) is None:
            updated_state = self._finish_experience(client.part, client.kept, client.received)
            if updated_state is not None:
                self.server.client_store[client.part.client_id] = updated_state

    # End of the round, and of a fit.

    @torch.no_grad()
    def take_turns(self, previous_state: State, share: float) -> None:
        """Let the methods change the server's model in the module, in the order of the callbacks.

        Args:
            previous_state: The server's state at the start of the round, including the server state of the methods.
            share: Fraction of the stream's clients whose uploads were accepted, above 0.
        """
        state, ends = state_tensors(self.module), _ends(self.stream, self.number)
        for method in self.methods:
            if overrides_hook(method, "process_aggregate"):
                draws = torch.Generator().manual_seed(derive_seed(self.seed, method.section_name, self.number))
                server_state = self.server.get_section(method.section_name)
                turn = Server(previous_state, state, server_state, share, self.module, draws, ends)
                changed_state = method.process_aggregate(turn)
                check_shapes(method, "process_aggregate", changed_state, state, "the server's model")
                check_tensors(method, "process_aggregate", server_state)
                for name, value in changed_state.items():
                    state[name].copy_(value)
                self.server.extra_tensors.update(
                    {f"{method.section_name}.{name}": value for name, value in server_state.items()}
                )

    def accept(self, clients: Iterable[str]) -> None:
        """Record the clients whose uploads were accepted in the round.

        Nothing is recorded if no method overrides `MethodBase.contribute_experience`.
        """
        if any(overrides_hook(method, "contribute_experience") for method in self.methods):
            self.server.accepted |= dict.fromkeys(clients, self.number)

    def _finish_experience(
        self, client_round: ClientRound, client_state: ClientState, received_state: State
    ) -> ClientState | None:
        """Return a client's state with the missing results of `MethodBase.end_experience`.

        Return None if no result is missing, or if the client has not trained in the experience.

        With full participation, a result is computed once, in the last round of the experience. If the client's last
        upload is dropped, or the fit stops within the experience, this function computes the result from the client's
        current state.
        """
        if PROGRESS not in client_state or int(client_state[PROGRESS]["experience"]) != client_round.experience_idx:
            return None
        missing = [
            method
            for method in self.methods
            if overrides_hook(method, "end_experience")
            and keeps_client_state(method, client_round)
            and not has_result(client_state, method.section_name)
        ]
        if not missing:
            return None
        updated_state = {**client_state, PROGRESS: {**client_state[PROGRESS]}}
        model_state = select_tensors(received_state, self.module)
        reads = any(method.needs.round_samples for method in missing)
        data = self.stream.client_samples(client_round.client_id, client_round.round_idx, self.seed) if reads else None
        for method in missing:
            memory = client_state.get(method.section_name, {})
            client = make_client(method, self.module, memory, received_state, client_round)
            self._set_history(method, client, client_state)
            result = result_of(method, client, model_state, data if method.needs.round_samples else None, {})
            updated_state |= sections_of(method, memory, result, None, client_state)
            note_result(updated_state, method.section_name)
        return updated_state

    def finish_stopped(self, clients: Iterable[str], rounds: int) -> None:
        """Compute missing results of `MethodBase.end_experience` after a fit that stopped after ``rounds`` rounds."""
        store, device = self.server.client_store, self.module.device
        for client in clients:
            client_state = store[client]
            trained = [number for number in trained_rounds(client_state) if number < rounds]
            if trained:
                client_round = self.stream.client_round(client, trained[-1])
                if next_round(self.stream, client_round, self.stream.plan.num_rounds) is None:
                    continue
                server_state = {**state_tensors(self.module), **self.server.extra_tensors}
                received_state = {**server_state, **local_tensors(client_state, device)}
                if (updated_state := self._finish_experience(client_round, client_state, received_state)) is not None:
                    store[client] = updated_state


def server_entries(methods: Sequence[MethodBase], module: L.LightningModule) -> ExtraTensors:
    """Return the server state of methods, with initial values and reductions.

    The module itself does not have these entries.
    """
    extra: dict[str, tuple[Tensor, Reduction | str]] = {}
    for method in methods:
        check_tensors(method, "init_server_state", server_state := method.init_server_state(module))
        for name, reduction in declared(method, server_state).items():
            extra[f"{method.section_name}.{name}"] = server_state[name].to(module.device), reduction
    return extra


def entered_state(server: FederatedServer, client_round: ClientRound, client_state: ClientState) -> ClientState:
    """Return a client's state at the start of a round, from its stored state."""
    return (
        enter_round(client_state, client_round.experience_idx, server.accepted.get(client_round.client_id, -1))
        if client_state
        else client_state
    )


def client_before(
    server: FederatedServer, module: L.LightningModule, method: MethodBase, client_round: ClientRound
) -> Client:
    """Return the `Client` for a method's hooks before a round, when the client has not received the server's state."""
    memory = entered_state(server, client_round, server.client_store[client_round.client_id]).get(
        method.section_name, {}
    )
    return make_client(method, module, memory, client_round=client_round)


def _ends(stream: ClientStream, number: int) -> bool:
    """Return whether the experience of at least one client ends with a round."""
    plan = stream.plan
    return number + 1 == plan.num_rounds or any(own[number] != own[number + 1] for own in plan.experiences.values())


def _lasting(trained_state: State, received_state: State, reductions: Mapping[str, Reduction]) -> State:
    """Return a trained client's state without changes that the server ignores.

    Entries that are neither uploaded nor client-local, such as entries with the reduction `fixed`, get the values that
    the client received.
    """
    fixed_names = {
        n for n in trained_state if n in reductions and not (reductions[n].is_uploaded or reductions[n].is_local)
    }
    return (
        {n: received_state[n] if n in fixed_names else value for n, value in trained_state.items()}
        if fixed_names
        else trained_state
    )


def _moved(memory: StateSection, device: torch.device) -> StateSection:
    """Return a client state on a device. A client state loaded from a disk or a checkpoint is on the CPU."""
    return memory if device.type == "cpu" else {name: value.to(device) for name, value in memory.items()}
