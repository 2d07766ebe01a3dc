"""A node: one client's training, on its own data, with what it remembers on its own disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from lightning_fcl import __version__
from lightning_fcl.deployment.answers import BOUND, name_of, normal
from lightning_fcl.deployment.decoding import reason_of
from lightning_fcl.deployment.outline import Outline
from lightning_fcl.deployment.own_data import count_samples, read_data, take_data
from lightning_fcl.deployment.parcel import Parcel, RefusedError, check_same, digest
from lightning_fcl.deployment.recipe import build, fingerprint
from lightning_fcl.deployment.train_client import train_client
from lightning_fcl.evaluation.files import cache_folder, locked, write_whole
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.federation.aggregation import State, entries
from lightning_fcl.federation.client_store import ClientStore

log = logging.getLogger(__name__)


class Node:
    """Answers a server's messages: it trains one client on this machine's own data."""

    def __init__(self, recipe: Mapping[str, Any], client: str, data: str, folder: str | Path | None = None) -> None:
        self.client = client
        self._recipe = recipe
        self._data = data
        self._folder = Path(folder) if folder is not None else cache_folder() / "nodes"
        self._print = fingerprint(recipe)

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
        own = own_folder(self._folder, name_of(parcel.head, "federation"), self.client)
        own.mkdir(parents=True, exist_ok=True)
        samples = count_samples(self._data, own / "data.json")  # who has none says so now
        return {"samples": samples, "held": self._held(parcel.head.get("held", []))}, {}

    def _held(self, names: Sequence[str]) -> str:
        """A digest of some entries as they are here from the start: of those that never travel."""
        state = entries(build(self._recipe).module) if names else {}
        if strange := [name for name in names if name not in state]:
            raise RefusedError(f"Expected names of the recipe's model but got `{strange[0]}`. Deploy one recipe.")
        return digest({name: state[name] for name in names})

    def _train(self, parcel: Parcel) -> tuple[dict[str, Any], State]:
        head, outline, parts = parcel.head, Outline.of_plain(parcel.head["outline"]), build(self._recipe)
        if outline.client != self.client:
            raise RefusedError(f"Expected a message for client {self.client} but got one for {outline.client}.")
        take_data(parts.stream, read_data(self._data), outline)
        if self.client not in parts.stream.plan.train[int(head["round"])]:
            return {"samples": 0}, {}
        own = own_folder(self._folder, str(head["federation"]), self.client)
        own.mkdir(parents=True, exist_ok=True)
        with locked(own / ".lock"):  # what a lost node has left behind may train still
            return train_client(parts, parcel.state, memories(own, self.client, int(head["round"])), head)


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
