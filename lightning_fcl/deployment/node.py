"""A node: one client's training, on its own data, with what it remembers on its own disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl import __version__
from lightning_fcl.data.client_round import ClientRounds
from lightning_fcl.deployment.answers import BOUND, name_of, normal
from lightning_fcl.deployment.decoding import reason_of
from lightning_fcl.deployment.node_server import NodeServer
from lightning_fcl.deployment.outline import Outline
from lightning_fcl.deployment.own_data import read_data, take_data
from lightning_fcl.deployment.parcel import Parcel, RefusedError, check_entries, check_same
from lightning_fcl.deployment.recipe import build, fingerprint
from lightning_fcl.evaluation.files import cache_folder, locked, write_whole
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.federation.aggregation import State, entries, load_entries
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.simulation.cohort import Cohort
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.round import Round

log = logging.getLogger(__name__)

MODEL, SERVER = "model/", "server/"
"""What names of tensors begin with: of the model, and of what a server keeps for methods."""


class Node:
    """Answers a server's messages: it trains one client on this machine's own data."""

    def __init__(self, recipe: Mapping[str, Any], client: str, data: str, folder: str | Path | None = None) -> None:
        self.client = client
        self._recipe = recipe
        self._data = data
        self._folder = Path(folder) if folder is not None else cache_folder() / "nodes"
        self._print = fingerprint(recipe)
        self._training: LocalFit | None = None

    def answer(self, parcel: Parcel) -> Parcel:
        """The answer to a message; a refusal, where it is none of this federation, or training has failed."""
        head: dict[str, Any] = {"version": __version__, "recipe": self._print, "client": self.client}
        head |= {name: parcel.head.get(name) for name in BOUND}
        try:
            check_same(parcel.head, self._print, "the server")
            answers = {"hello": self._hello, "train": self._train}
            if parcel.head.get("kind") not in answers:
                raise RefusedError(f"Expected a message to say hello or to train but got {parcel.head.get('kind')!r}.")
            more, state = answers[parcel.head["kind"]](parcel)
            return Parcel({**head, **more}, state)
        except Exception as error:  # whatever fails here, the server has to know, and goes on with others
            if not isinstance(error, RefusedError):
                log.exception("Client %s could not answer.", self.client)
            said = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
            return Parcel({**head, "refused": reason_of(said)})

    def _hello(self, parcel: Parcel) -> tuple[dict[str, Any], State]:
        own_folder(self._folder, name_of(parcel.head, "federation"), self.client)
        samples = len(read_data(self._data).samples)  # who has none says so now
        return {"samples": samples, "held": self._fit.held(parcel.head.get("held", []))}, {}

    @property
    def _fit(self) -> LocalFit:
        if self._training is None:
            self._training = LocalFit(self._recipe)
        return self._training

    def _train(self, parcel: Parcel) -> tuple[dict[str, Any], State]:
        head, outline = parcel.head, Outline.of_plain(parcel.head["outline"])
        if outline.client != self.client:
            raise RefusedError(f"Expected a message for client {self.client} but got one for {outline.client}.")
        fit, round = self._fit, int(head["round"])
        take_data(fit.parts.stream, read_data(self._data), outline)
        if self.client not in fit.parts.stream.plan.train[round]:
            return {"samples": 0}, {}
        own = own_folder(self._folder, str(head["federation"]), self.client)
        own.mkdir(parents=True, exist_ok=True)
        with locked(own / ".lock"):  # what a lost node has left behind may train still
            return fit.round(parcel, memories(own, self.client, round))


def own_folder(folder: Path, federation: str, client: str) -> Path:
    """Where a client keeps what it remembers of a federation: no folder that another name may be taken for."""
    try:
        own = inside(folder, *(quote(name, safe="", errors="surrogatepass") for name in (federation, client)))
    except ValueError as error:
        raise RefusedError(str(error)) from error
    for parent, name in ((own.parent.parent, federation), (own.parent, client)):
        for other in map(unquote, os.listdir(parent) if parent.exists() else ()):
            if other != name and normal(other) == normal(name):
                raise RefusedError(
                    f"Expected a name of its own beside {other!r} but got {name!r}, which is the same once Unicode is "
                    "normalised. Rename one."
                )
    return own


def memories(folder: Path, client: str, round: int) -> Path:
    """Where a client's memories are, as they were before a round: also where the round is trained again."""
    now, before, note = (
        ClientStore("disk", folder / "now"),
        ClientStore("disk", folder / "before"),
        folder / "round.json",
    )
    begun = int(json.loads(note.read_text())["round"]) if note.exists() else -1
    if round < begun:
        raise RefusedError(
            f"Expected a round from {begun} on, which is the last that client {client} has begun, but got {round}: the "
            "server has gone back further than one round. Start it from its newest checkpoint."
        )
    if round == begun or (begun >= 0 and client not in now):  # it was ended as it was about to keep the new ones
        now[client] = before[client]
    if round > begun:
        before[client] = now[client]
        write_whole(note, json.dumps({"round": round}))
    return folder / "now"


class LocalFit:
    """The Trainer of a node: each round is an epoch of it, in a fit of its own."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.parts = build(recipe)
        self._recipe_server = self.federation.server
        self._initial = {name: value.detach().clone() for name, value in entries(self.parts.module).items()}
        self.parts.strategy.cohort_size = 1
        self.trainer = L.Trainer(
            strategy=self.parts.strategy,
            callbacks=self.parts.callbacks,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **self.parts.trainer,
        )

    @property
    def federation(self) -> Federation:
        return self.parts.strategy.federation

    def held(self, names: Sequence[str]) -> str:
        """A digest of some entries as they are here from the start: of those that never travel."""
        strange = [name for name in names if name not in self._initial]
        if strange:
            raise RefusedError(f"Expected names of the recipe's model but got `{strange[0]}`. Deploy one recipe.")
        return digest({name: self._initial[name] for name in names})

    def round(self, parcel: Parcel, folder: Path) -> tuple[dict[str, Any], State]:
        """Train a round: what is said beside the upload, and the upload."""
        head, state = parcel.head, parcel.state
        plan, round = self.parts.stream.plan, int(head["round"])
        module = self.parts.module
        load_entries(module, self._initial)
        received = {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
        known = {name: value for name, value in entries(module).items() if name in received}
        check_entries(received, known, "the server")
        load_entries(module, {**entries(module), **received})
        extra = {name.removeprefix(SERVER): value for name, value in state.items() if name.startswith(SERVER)}
        server = NodeServer(self._recipe_server, folder, received.keys() | extra.keys())
        server.extra = extra
        self.federation.server = server
        rounds: list[NodeRound] = []

        def new_round(federation: Federation) -> NodeRound:
            rounds.append(NodeRound(federation, head["optimizer"]))
            return rounds[-1]

        self.parts.strategy.new_round = new_round
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = round
        self.trainer.fit_loop.max_epochs = int(head["max_epochs"])
        self.trainer.fit(module, datamodule=self.parts.stream)
        record, sent = server.record, server.upload_to_send()
        if sent is None:
            why = record.dropped.get(plan.clients[0], "it has none")
            raise RefusedError(f"Expected an upload of client {plan.clients[0]} but {why}.")
        trained = rounds[-1].clients
        samples = int(trained.samples[0])
        said = {"samples": samples, "rehearsed": int(trained.trained[0]) - samples, "diverged": bool(record.diverged)}
        return said, {name: value.cpu() for name, value in sent.items()}


class NodeRound(Round):
    """A node's round, which ends before anything is brought together: that is the server's part.

    Args:
        federation: The federation of one.
        groups: How the optimizer stands in this round, by the server's schedules.
    """

    def __init__(self, federation: Federation, groups: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(federation)
        self.groups = groups
        self.clients = ClientRounds.of([])

    def begin(self) -> None:
        super().begin()
        groups = [group for optimizer in self.federation.optimizers for group in optimizer.param_groups]
        for group, values in zip(groups, self.groups, strict=True):
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def upload(self, cohort: Cohort) -> None:
        super().upload(cohort)
        self.clients = cohort.clients

    def aggregate(self) -> None:
        """End the fit."""
        self.cohort, self.done = None, True
        self.federation.module.trainer.should_stop = True


def digest(state: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
