"""Bytes that a federation transmits, computed before or during a fit by the accounting that records communication."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as L
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, ModelPruning

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.federation.aggregation import frozen_parameters
from lightning_fcl.federation.reductions import Reduction
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.uploads import Uploads
from lightning_fcl.methods.base import overrides_hook
from lightning_fcl.methods.method_round import MethodRound
from lightning_fcl.simulation.federation import Federation

# Callbacks of Lightning that freeze or change parameters.
_CHANGING = (BaseFinetuning, LambdaCallback, ModelPruning)


@dataclass(frozen=True)
class CommunicationForecast:
    """The bytes that clients transmit in a fit in which no upload is dropped.

    Args:
        upload: Bytes that a client uploads in a round.
        download: Bytes that a client downloads in a round.
        once: Bytes that a client downloads only once, in its first round.
        trainings: Number of trainings: the sum over the rounds of the number of clients that train.
        clients: Number of clients that train in at least one round.
        uncounted: Names of methods, reductions and transforms that transmit tensors whose sizes are not known before
            training. If there are any, the numbers of bytes are lower bounds.
        changing: Names of classes of other packages that can freeze or add parameters during the fit. If there are any,
            the numbers of bytes are those of the first round.
        fixed: Whether every client that trains transmits its upload. False in a swarm and on a simulated clock.
    """

    upload: int
    download: int
    once: int
    trainings: int
    clients: int
    uncounted: tuple[str, ...]
    changing: tuple[str, ...]
    fixed: bool

    @property
    def total_upload(self) -> int:
        """Bytes that all clients upload in all rounds."""
        return self.upload * self.trainings

    @property
    def total_download(self) -> int:
        """Bytes that all clients download in all rounds."""
        return self.download * self.trainings + self.once * self.clients


def forecast_communication(federation: Federation, rounds: int) -> CommunicationForecast | None:
    """Return the bytes that clients transmit, before the first round of a fit that will not train.

    The server starts a round, and one client downloads and uploads the initial state, as in a fit. The sizes of tensors
    that depend on their values, and of messages of methods, are not counted.

    Args:
        federation: The federation, after the start of the fit.
        rounds: Number of rounds of the fit.

    Returns:
        The forecast, or None if no client can train, or the initial state is non-finite.
    """
    plan, participation, server, number = federation.stream.plan, federation.participation, federation.server, 0
    trained = [participation.expected_clients(plan, round_idx) for round_idx in range(rounds)]
    while number < len(trained) and not trained[number]:
        number += 1
    if number == len(trained):
        return None
    method_round = MethodRound(
        number, federation.module, federation.methods, federation.stream, server, federation.seed, participation.is_full
    )
    server.start_round(federation.module, federation.settings.rules, method_round.server_entries(), number)
    client = federation.stream.client_round(trained[number][0], number)
    (state,), _ = server.download([client.client_id])
    uploads, *_ = server.encode(ClientRounds.from_rounds([client]), {name: v[None] for name, v in state.items()})
    if not len(uploads):
        return None
    uncounted = find_uncounted(federation)
    once_nbytes = server.sent_once.missing_bytes(client.client_id)
    variable = {name: of for name, of in server.reductions.items() if not of.has_static_size and name in state}
    return CommunicationForecast(
        upload=uploads.nbytes()[0] - _variable_upload(uploads, variable),
        download=server.record.download_bytes[client.client_id] - once_nbytes - _variable_download(server, variable),
        # Tensors that a method sends once change with the experiences.
        once=0 if uncounted_methods(federation) else once_nbytes,
        trainings=sum(map(len, trained)),
        clients=len({name for names in trained for name in names}),
        uncounted=uncounted,
        changing=find_changing(federation.module.trainer),
        fixed=participation.swarm is None and participation.synchronization is None,
    )


def find_uncounted(federation: Federation) -> tuple[str, ...]:
    """Return the names of methods, reductions and transforms that transmit tensors of unknown sizes.

    The server must have started a round.
    """
    server = federation.server
    sparse = {
        str(of)
        for name, of in server.reductions.items()
        if not of.has_static_size and name in server.state and name not in server.extra_tensors
    }
    exchanges = (type(one).__name__ for one in server.pipeline.exchanges)
    return (*uncounted_methods(federation), *sorted(sparse), *exchanges)


def find_changing(trainer: L.Trainer) -> tuple[str, ...]:
    """Return the names of the module's class and of callbacks' classes that can freeze or add parameters during a fit.

    Clients do not transmit frozen parameters. The classes of this library do not change the parameters, and a few
    classes of Lightning do.
    """
    parts = [trainer.lightning_module, *get_callbacks(trainer)]
    return tuple(
        type(part).__name__
        for part in parts
        if isinstance(part, _CHANGING) or not type(part).__module__.startswith(("lightning_fcl.", "lightning.pytorch."))
    )


def _variable_upload(uploads: Uploads, variable: dict[str, Reduction]) -> int:
    """Return the bytes of the uploaded entries whose sizes depend on their values."""
    return sum(of.upload_nbytes(uploads.values[name][0]) for name, of in variable.items() if name in uploads.values)


def _variable_download(server: FederatedServer, variable: dict[str, Reduction]) -> int:
    """Return the bytes of the downloaded entries whose sizes depend on their values."""
    return sum(of.upload_nbytes(server.state[name]) for name, of in variable.items() if of.is_downloaded)


def uncounted_methods(federation: Federation) -> list[str]:
    """Return the names of the methods that transmit tensors whose sizes are not known before training.

    These tensors are messages and replies, and tensors of the server state that are sent once or whose sizes depend on
    their values. A method that changes the aggregate can also change frozen parameters, which clients then transmit.
    """
    server, names = federation.server, []
    hooks = ["message", "reply"]
    if frozen_parameters(federation.module, server.reductions):
        hooks.append("process_aggregate")
    for method in federation.methods:
        prefix = f"{method.section_name}."
        rules = [server.reductions[name] for name in server.extra_tensors if name.startswith(prefix)]
        if overrides_hook(method, "init_server_state"):
            # The server state can have further entries in later experiences.
            rules += [of for of in method.reductions.values() if isinstance(of, Reduction)]
        varies = any(of.once or not of.has_static_size for of in rules)
        if varies or any(overrides_hook(method, hook) for hook in hooks):
            names.append(type(method).__name__)
    return names
