"""The models that selected clients of a federation predict with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import lightning.pytorch as L

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import load_state_tensors, state_tensors
from lightning_fcl.federation.protocols import FederationProtocol

ClientSelection: TypeAlias = Literal["all", "none"] | list[str]
"""Clients that a callback tests: all, none, or those with the ids in a list."""


def check_selection(clients: ClientSelection) -> None:
    """Raise ValueError if a selection of clients is another string than "all" and "none"."""
    if isinstance(clients, str) and clients not in ("all", "none"):
        raise InvalidValueError(
            f'Expected `clients` to be "all", "none" or a list of strings, but got "{clients}".',
            hint=f'Use `clients=["{clients}"]`.',
            argument="clients",
            value=clients,
        )


def is_selected(client: str, clients: ClientSelection) -> bool:
    """Return whether a selection contains a client."""
    return clients == "all" or (clients != "none" and client in clients)


def iterate_client_models(
    federation: FederationProtocol, module: L.LightningModule, clients: Iterable[str]
) -> Iterator[tuple[str, bool]]:
    """Yield each client of this process, and whether the client predicts with the server's model.

    The module must have the server's state. If a client predicts with another model, this model is in the module until
    the next step of the iteration. After the iteration, the module has the server's state again.

    Args:
        federation: The federation.
        module: The module.
        clients: The clients. Clients that another process stores are left out.
    """
    server_state = {name: value.detach().clone() for name, value in state_tensors(module).items()}
    try:
        for client in clients:
            if not federation.hosts(client):
                continue
            state = federation.client_state_dict(client, server_state)
            # If nothing is client-local, `client_state_dict` returns the server's state itself.
            is_server_model = state is server_state
            if not is_server_model:
                load_state_tensors(module, state)
            yield client, is_server_model
    finally:
        load_state_tensors(module, server_state)
