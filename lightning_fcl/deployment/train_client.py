"""A client's round on a node: what clients of a simulation do, in a Trainer's fit of one epoch."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from torch import Tensor

from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.deployment.changes import changes
from lightning_fcl.deployment.parcel import MODEL, SERVER, RefusedError, check_entries
from lightning_fcl.deployment.recipe import Parts
from lightning_fcl.errors import quoted
from lightning_fcl.federation.aggregation import State, entries, load_entries
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.simulation.cohort import Cohort
from lightning_fcl.simulation.round import Round, Work


def train_client(parts: Parts, state: State, memories: Path, head: Mapping[str, Any]) -> tuple[dict[str, Any], State]:
    """Train the only client of a stream in a round.

    Args:
        parts: What it trains with, newly made.
        state: What the server has sent.
        memories: The folder of what the client keeps, in which this round's takes the place of what was there.
        head: What the server says of the round.

    Returns:
        What is said beside the upload, and the upload: what has changed of what the server has sent.

    Raises:
        RefusedError: If the server has sent another model, or there is no upload.
    """
    server, (client,) = _receive(parts, state, memories), parts.stream.plan.clients
    trained, upload = ClientRounds.of([]), dict[str, Tensor]()

    def send(clients: ClientRounds, states: State) -> list[bool]:
        nonlocal trained
        trained, (taken, _) = clients, server.check(clients, states)
        if all(taken):
            up = {name: states[name] for name, reduction in server.reductions.items() if reduction.up}
            coded, _ = server.code(clients.clients, up)
            upload.update({name: value[0].detach().clone() for name, value in {**up, **coded}.items()})
        return taken

    def work(round: Round) -> Generator[Any, None, None]:
        _check_received(server, state)
        groups = [group for optimizer in round.federation.optimizers for group in optimizer.param_groups]
        for group, values in zip(groups, head["optimizer"], strict=True):  # as the server's schedules have them
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
        yield from round.train(round.cohorts.popleft(), send)
        round.cohort, round.done = None, True  # bringing uploads together is the server's part
        round.federation.module.trainer.should_stop = True

    _fit(parts, client, work, int(head["round"]), int(head["max_epochs"]))
    record = server.record
    if not upload:
        raise RefusedError(f"Expected an upload of client {client} but {record.dropped.get(client, 'it has none')}.")
    start = {name: server.reductions[name].start(server.state[name]) for name in upload}
    samples, rehearsed = int(trained.samples[0]), int(trained.trained[0] - trained.samples[0])
    said = {"samples": samples, "rehearsed": rehearsed, "diverged": bool(record.diverged)}
    return said, {name: value.cpu() for name, value in changes(upload, start).items()}


def _receive(parts: Parts, state: State, memories: Path) -> FederatedServer:
    """Put what the server has sent into the module; the server as a node has it: with the memories of one client."""
    received, known = _without(MODEL, state), entries(parts.module)
    check_entries(received, {name: value for name, value in known.items() if name in received}, "the server")
    load_entries(parts.module, {**known, **received})
    federation = parts.strategy.federation
    federation.server = FederatedServer(ClientStore("disk", memories), compression=federation.server.compression)
    federation.server.extra = _without(SERVER, state)
    return federation.server


def _check_received(server: FederatedServer, state: State) -> None:
    """Refuse a state without some of what travels down."""
    received = _without(MODEL, state).keys() | _without(SERVER, state).keys()
    if missing := [name for name, of in server.reductions.items() if of.down and name not in received]:
        raise RefusedError(
            f"Expected the server to send {quoted(missing)} of this recipe's model but it did not. "
            "Deploy one recipe everywhere."
        )


def _fit(parts: Parts, client: str, work: Work, round: int, rounds: int) -> None:
    """Let Lightning run a round, whose steps of the client are then what they are in any Trainer."""
    parts.strategy.cohort_size = 1
    parts.strategy.new_round = lambda federation: Round(federation, [Cohort(federation, [client], round)], work)
    trainer = L.Trainer(
        strategy=parts.strategy,
        callbacks=parts.callbacks,
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **parts.trainer,
    )
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = round
    trainer.fit(parts.module, datamodule=parts.stream)


def _without(prefix: str, state: State) -> State:
    """The entries whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
