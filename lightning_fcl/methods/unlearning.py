"""Unlearning: a client leaves, and what it has added to the server's sums is taken away again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as L
import torch

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State, state_tensors
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.protocols import FederationProtocol, find_federation
from lightning_fcl.federation.ranks import gather_by_client
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.tasks.ridge_base import RidgeTask
from lightning_fcl.validation import check_arguments, check_clients

_TAG = "readout.tag"


class Unlearning(Method):
    """After a round: makes the server forget clients exactly, as if they had never taken part in its sums.

    Every client keeps the sum of what it has uploaded to entries with the reduction ``sum``. When it asks to be
    forgotten, it sends that sum once more, which the server subtracts; it takes part in no later round.

    Args:
        requests: For each client that leaves, the round (from 0) after which it does.

    Raises:
        ValueError: If a client is not in the stream or has no data until it leaves, if the round never comes, or if the
            module's readout is not solved for from sums of clients' parts: B of low rank, or estimated, is none.

    Example:
        >>> Unlearning(requests={"7": 3}).requests
        {'7': 3}
    """

    needs: ClassVar[Needs] = Needs(federation_reason="call `RidgeReadout.unlearn` with the statistics that are to go")

    @check_arguments
    def __init__(self, requests: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.requests = {str(client): round_idx for client, round_idx in (requests or {}).items()}
        self.unlearned_clients: list[str] = []
        self._federation: FederationProtocol | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reason: str | None = "shares its weights: means cannot be taken apart"
        if isinstance(pl_module, RidgeTask):
            reason = pl_module.no_unlearning_reason
        if reason is not None:
            raise InvalidValueError(
                "Expected a task of ridge regression that shares its statistics for `Unlearning` but got a "
                f"`{type(pl_module).__name__}` that {reason}.",
                argument="module",
                value=type(pl_module).__name__,
            )
        self._federation = find_federation(trainer)
        self._forget_again()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plan = require_stream(trainer).plan
        check_clients("`requests`", self.requests, plan.clients)
        rounds = trainer.max_epochs or 0
        for client, round_idx in self.requests.items():
            if not 0 <= round_idx < rounds:
                raise InvalidValueError(
                    f"Expected `requests` after one of the fit's {rounds} rounds, 0 to {rounds - 1}, but client "
                    f"{client} asks after round {round_idx}, which never comes.",
                    hint="Name an earlier round, or raise `max_epochs`.",
                    argument="requests",
                )
            if not any(client in current for current in plan.train[: round_idx + 1]):
                raise InvalidValueError(
                    f"Expected `requests` of clients that have taken part but client {client}, which asks after round "
                    f"{round_idx}, has no data before.",
                    hint="Name a later round for this client, or leave the client out of `requests`.",
                    argument="requests",
                )

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory, federation = client.method_state, client.federation
        assert federation is not None  # as it needs one
        sums = [
            name
            for name, of in federation.server.reductions.items()
            if of.additive and not (of.weighted or of.is_downloaded)
        ]
        if not sums or client.missed_sync:  # what is unsent comes again
            return memory
        should_add = bool(memory) and torch.equal(memory[_TAG], trained_state[_TAG])
        client_sums = {name: trained_state[name].clone() + (memory[name] if should_add else 0) for name in sums}
        return {**client_sums, _TAG: trained_state[_TAG].clone()}

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = self._federation
        for client, round_idx in self.requests.items():
            if (
                federation is not None
                and round_idx == federation.current_round.round_idx
                and isinstance(pl_module, RidgeTask)
            ):
                self.unlearn_client(federation, pl_module, client)

    def unlearn_client(self, federation: FederationProtocol, module: RidgeTask, client: str) -> None:
        """Take a client's part out of the server's sums, and all that it has kept out of the store."""
        local_sections = (
            {client: federation.server.client_store.get_section(client, self.section_name)}
            if federation.hosts(client)
            else {}
        )
        memory, state = gather_by_client(federation.ranks, local_sections, [client])[client], state_tensors(module)
        # Sums of another reservoir are not in the server's any more.
        if memory and torch.equal(memory[_TAG].to(state[_TAG].device), state[_TAG]):
            for name, value in memory.items():
                if name != _TAG:
                    state[name].data -= value.to(state[name].device)
            module.solve()
        _forget(federation, client)
        self.unlearned_clients.append(client)

    def fingerprint(self) -> dict[str, Any]:
        return {"requests": self.requests}

    def state_dict(self) -> dict[str, Any]:
        return {"forgotten": self.unlearned_clients}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.unlearned_clients = list(state_dict["forgotten"])
        self._forget_again()

    def _forget_again(self) -> None:
        if self._federation is not None:
            for client in self.unlearned_clients:
                _forget(self._federation, client)


def _forget(federation: FederationProtocol, client: str) -> None:
    """Forget all that a client has kept; it takes part in no later round."""
    if federation.server.client_store.is_in_memory or federation.hosts(client):
        federation.server.client_store[client] = {}
    federation.participation.withdraw(client)
