"""Cases of evil names: in registries, and wherever else a file or a message names a file."""

from __future__ import annotations

import http.server
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from campaign import Campaign, Outcome, call
from names import DOORS, EVIL, NAME, evil_zoo, hashed, mixed

from lightning_fcl.deployment.messages import RefusedError
from lightning_fcl.deployment.node import memories, own_folder
from lightning_fcl.deployment.own_data import split_file
from lightning_fcl.evaluation.files import inside, write_whole
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.zoo.registry import REGISTRY, collect, package_folder


def _victims(folder: Path, *more: Path) -> dict[Path, bytes]:
    """Files where evil names lead to, and all others that are there."""
    for place in (folder, folder / "a", *more):
        place.mkdir(parents=True, exist_ok=True)
        for name in ("x", "x.png", "y", "victim"):
            (place / name).write_bytes(b"whole")
    return _all(folder)


def _all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def evil_registry_of(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """A command that is handed an evil registry, in a folder or at a URL, ends with one message and touches nothing."""
    zoo, door = folder / "zoo", rng.choice(sorted(DOORS))
    collect(package_folder() / NAME, zoo)
    value = rng.choice([*DOORS[door][2], str(folder / "victim")])
    evil_zoo(zoo, door, value)
    data = (zoo / REGISTRY).read_bytes()
    before, words = (
        _victims(folder, zoo, zoo / NAME),
        rng.choice([["fetch"], ["verify"], ["info"], ["fetch", "--to", "copy"]]),
    )
    afar = rng.random() < 0.5
    what = f"{door}: {ascii(value)[:80]}, {'at a URL' if afar else 'in a folder'}, zoo {words[0]}"
    with _served(zoo) as url:
        place = f"{url}#sha256={hashed(data)}" if afar else str(zoo)
        os.environ |= {"LIGHTNING_FCL_ZOO": place, "LIGHTNING_FCL_CACHE": str(folder / "cache")}
        try:
            said = call(["zoo", words[0], NAME, *words[1:]], folder)
        finally:
            del os.environ["LIGHTNING_FCL_ZOO"], os.environ["LIGHTNING_FCL_CACHE"]
    if said.code != 2 or len(said.text) > 2000:
        return said.wrong(what) or Outcome("wrong ending", what, f"exit {said.code}\n{said.text[:2000]}")
    # Of a registry from afar only what its digest is known of is kept: it, and what it lists itself.
    kept = {path: data for path, data in _all(folder).items() if afar and path.is_relative_to(folder / "cache" / "zoo")}
    return _compared(what, folder, {**before, **kept})


def _compared(what: str, folder: Path, wanted: dict[Path, bytes]) -> Outcome:
    found = _all(folder)
    if changed := [str(path) for path, data in wanted.items() if found.get(path) != data]:
        return Outcome("silent difference", what, str(changed))
    if more := [str(path) for path in found.keys() - wanted.keys()]:
        return Outcome("left-over", what, str(more))
    return Outcome("fine", what)


def _remember(own: Path, name: str) -> None:
    ClientStore("disk", own)[name] = {"model": {"weight": torch.zeros(2)}}


PLACES: dict[str, Callable[[Path, str], object]] = {
    "a file": lambda own, name: write_whole(inside(own, name), "written"),
    "a client's memory": _remember,
    "a federation": lambda own, name: memories(own_folder(own, name, "client"), "client", 0),
    "a node's client": lambda own, name: memories(own_folder(own, "federation", name), name, 0),
    "a share of a split": lambda own, name: write_whole(split_file(own, name), "written"),
}


def evil_name(campaign: Campaign, rng: random.Random, folder: Path) -> Outcome:
    """What is written under an evil name lies in its folder, or it is refused in one message."""
    own, place = folder / "b" / "own", rng.choice(sorted(PLACES))
    name = rng.choice([mixed(rng), str(rng.choice(EVIL)), str(folder / "victim")])
    what = f"{place}: {ascii(name)[:80]}"
    _victims(folder, folder / "b", own, own / "a")
    before = {path: data for path, data in _all(folder).items() if own not in path.parents}
    try:
        PLACES[place](own, name)
    except (ValueError, RefusedError, OSError) as error:
        if not str(error).startswith("Expected ") and not isinstance(error, UnicodeEncodeError):
            return Outcome("raw traceback", what, f"{type(error).__name__}: {str(error)[:500]}")
    found = {path: data for path, data in _all(folder).items() if own not in path.parents}
    if found == before:
        return Outcome("fine", what)
    return Outcome("silent difference", what, str([str(path) for path in found.keys() ^ before.keys()]))
