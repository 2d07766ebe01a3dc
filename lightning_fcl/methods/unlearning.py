"""Unlearning: a client leaves, and the server subtracts the client's contribution from its sums."""

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
    """Exact unlearning (Cao and Yang, 2015): subtract clients from the server's sums.

    The server's sums then equal the sums of the remaining clients.

    Every client keeps the sum of its uploads to entries with the reduction ``sum``. When a client leaves, it uploads
    this sum again, and the server subtracts the sum. The client does not train in later rounds.

    Args:
        requests: For each client that leaves, the number of the round (from 0) after which it leaves.

    Raises:
        ValueError: If the Trainer does not run a federation, a client is not in the stream, or a client has no data up
            to the round after which it leaves. Also if the fit does not reach this round. Also if the module does not
            compute its readout from sums of statistics, or if the statistics B are estimated or of low rank.

    Example:
        >>> Unlearning(requests={"7": 3}).requests
        {'7': 3}
    """

    citations: ClassVar[tuple[str, ...]] = ("cao2015unlearning",)

    needs: ClassVar[Needs] = Needs(federation_reason="call `RidgeReadout.unlearn` with the statistics to remove")

    @check_arguments
    def __init__(self, requests: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.requests = {str(client): round_idx for client, round_idx in (requests or {}).items()}
        self.unlearned_clients: list[str] = []
        self._federation: FederationProtocol | None = None

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reason: str | None = "uploads weights: a client cannot be removed from their mean"
        if isinstance(pl_module, RidgeTask):
            reason = pl_module.no_unlearning_reason
        if reason is not None:
            raise InvalidValueError(
                "Expected a ridge regression task that uploads its statistics for `Unlearning`, but got a "
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
                    f"Expected each round in `requests` to be at least 0 and below {rounds}, the number of rounds "
                    f"of the fit, but got {round_idx} for client {client}.",
                    hint="Use a round of the fit, or raise `max_epochs`.",
                    argument="requests",
                )
            if not any(client in current for current in plan.train[: round_idx + 1]):
                raise InvalidValueError(
                    f"Expected `requests` of clients that have trained, but client {client}, which leaves after round "
                    f"{round_idx}, has no data up to that round.",
                    hint="Use a later round for this client, or leave the client out of `requests`.",
                    argument="requests",
                )

    def update_client_state(self, client: Client, trained_state: State, data: Batch) -> StateSection:
        memory, federation = client.method_state, client.federation
        # `federation_reason` in `needs` requires a federation.
        assert federation is not None
        sums = [
            name
            for name, of in federation.server.reductions.items()
            if of.additive and not (of.weighted or of.is_downloaded)
        ]
        # The client uploads unsent statistics again in a later round.
        if not sums or client.missed_sync:
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
        """Subtract a client's contribution from the server's sums, and delete the client's state.

        Nothing is subtracted if the contribution belongs to an earlier reservoir.
        """
        local_sections = (
            {client: federation.server.client_store.get_section(client, self.section_name)}
            if federation.hosts(client)
            else {}
        )
        memory, state = gather_by_client(federation.ranks, local_sections, [client])[client], state_tensors(module)
        # The server's sums belong to the current reservoir only. Sums of another reservoir were removed before.
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
    """Delete the state of a client, and exclude the client from all later rounds."""
    if federation.server.client_store.is_in_memory or federation.hosts(client):
        federation.server.client_store[client] = {}
    federation.participation.withdraw(client)
