"""Where published networks are: in a folder, in the package, in the cache, at a URL, on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.files import cache_folder, locked, replacing, write_whole, writing
from lightning_fcl.evaluation.inside import inside
from lightning_fcl.hub.download import download
from lightning_fcl.hub.sealed import seal, unseal
from lightning_fcl.zoo.entry import (
    CONFIG,
    CONTINUE,
    FILES,
    Entry,
    cast_fields,
    check_file,
    read_config,
    read_entry,
    read_folder,
)
from lightning_fcl.zoo.hub import from_hub

FORMAT = 1
"""The version of registries."""

REGISTRY, LOCK = "registry.json", ".registry.lock"

_URL = re.compile(r"(?P<url>https?://[^#]+?)/?(#sha256=(?P<digest>[0-9a-f]{64}))?", re.IGNORECASE)


@dataclass(frozen=True)
class Published:
    """An entry of a registry."""

    entry: Entry
    folder: str

    def __post_init__(self) -> None:
        if self.folder not in (self.entry.name, self.entry.full_name):
            raise ValueError(
                f"Expected the folder of {self.entry.full_name} to have its name but got {self.folder[:100]!r}. Ask "
                "its publisher."
            )

    @property
    def config(self) -> dict[str, Any]:
        data = self.entry.text().encode()
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def files(self, to_continue: bool = False) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of the entry's files, by name; what it goes on learning from if that is wanted."""
        own = {name: told for name, told in self.entry.files.items() if to_continue or name != CONTINUE}
        return {CONFIG: self.config, **own}

    def plain(self) -> dict[str, Any]:
        return {"entry": self.entry.plain(), "folder": self.folder, "config": self.config}


@dataclass(frozen=True)
class Registry:
    """A registry, and where its folders may be.

    Args:
        places: Folders and URLs, the first that has an entry counts.
    """

    entries: tuple[Published, ...]
    places: tuple[str, ...]

    def find(self, name: str) -> Published | None:
        """The newest version of a name, or that which the name tells; None: there is none."""
        base, _, version = name.partition("@")
        own = [one for one in self.entries if one.entry.name == base and version in ("", str(one.entry.version))]
        return max(own, key=lambda one: one.entry.version, default=None)


def list_models(pattern: str = "*", pretrained: bool = True) -> list[str]:
    """The names of published networks, in alphabetical order.

    Args:
        pattern: As file names have it: ``"*har*"``.
        pretrained: Whether of trained ones; else the names of the networks of `lightning_fcl.models`.

    Example:
        >>> list_models("mlp.*")
        ['mlp.digits.flwf2t_replay']
    """
    if not pretrained:
        return sorted(
            name for name in import_module("lightning_fcl.models").__all__ if fnmatch(name.lower(), pattern.lower())
        )
    return [*list_published(pattern)]


def list_published(pattern: str = "*") -> dict[str, Published]:
    """What the registries say of the newest version of each name, in alphabetical order; the first registry counts."""
    newest: dict[str, Published] = {}
    for registry in registries():
        names = {one.entry.name for one in registry.entries} - {*newest}
        newest |= {name: found for name in names if (found := registry.find(name)) is not None}
    return {name: newest[name] for name in sorted(newest) if fnmatch(name, pattern)}


def folder_of(name: str | Path, to_continue: bool = False) -> Path:
    """The folder of an entry on this machine, its files verified against the registry that names it."""
    text = str(name)
    if isinstance(name, Path) or (os.sep in text.removeprefix("hf:") and not text.startswith("hf:")):
        return Path(name).expanduser()
    if text.startswith("hf:"):
        return from_hub(text, to_continue)
    return _verified(*_found(text), to_continue)


def find(name: str) -> Published:
    return _found(name)[1]


def _found(name: str) -> tuple[Registry, Published]:
    for registry in registries():
        if (published := registry.find(name)) is not None:
            return registry, published
    hint = did_you_mean(name.partition("@")[0], list_models())
    raise ValueError(
        f"Expected the name of a published model but got {name!r}.{hint} `lightning-fcl zoo ls` lists them."
    )


def registries() -> Iterator[Registry]:
    """That which ``LIGHTNING_FCL_ZOO`` names, a folder or a URL with its SHA-256; then the package's.

    Files of the package's that do not travel with it are looked for at the setting's URL, if that tells no SHA-256.
    """
    place = os.environ.get("LIGHTNING_FCL_ZOO", "")
    remote = _URL.fullmatch(place)
    if place and (remote is None or remote["digest"]):
        yield _told(place)
    own = package_folder()
    if (own / REGISTRY).is_file():
        more = (remote["url"],) if remote is not None else ()
        yield read_registry((own / REGISTRY).read_bytes(), str(own), *more)


@cache
def package_folder() -> Path:
    """The package's own zoo: of the wheel, or of the checkout."""
    inside = Path(__file__).parent / "models"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "zoo"


def read_registry(data: bytes, *places: str) -> Registry:
    where = f"{places[0]}/{REGISTRY}"
    content = unseal(data, where)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"Expected {where} to be of format {FORMAT} but it is of {content.get('format')}: another version of "
            "lightning-fcl wrote it. Load it with that version."
        )
    models = content.get("models")
    if not isinstance(models, list):
        raise ValueError(f"Expected {where} to list models but it does not. Get it again.")
    return Registry(tuple(_read_published(one, where) for one in models), places)


def _read_published(content: object, where: str) -> Published:
    told = dict(content) if isinstance(content, dict) else {}
    config, entry = told.pop("config", None), read_entry(told.get("entry"), where)
    published = Published(**cast_fields(Published, {**told, "entry": entry}, where))
    if config != published.config:
        raise ValueError(
            f"Expected {where} to tell the SHA-256 of the configuration of {entry.full_name} but got "
            f"{str(config)[:200]}. Get it again, or ask its publisher."
        )
    return published


def register(to: Path, published: Published) -> None:
    others = [one for one in registered(to) if one.entry.full_name != published.entry.full_name]
    ordered = sorted([*others, published], key=lambda one: (one.entry.name, one.entry.version))
    write_whole(to / REGISTRY, seal({"format": FORMAT, "models": [one.plain() for one in ordered]}))


def registered(folder: Path) -> tuple[Published, ...]:
    """What the registry of a folder lists; nothing, if it has none yet."""
    file = folder / REGISTRY
    return read_registry(file.read_bytes(), str(folder)).entries if file.is_file() else ()


def published_in(folder: Path) -> Published:
    return Published(read_folder(folder), folder.name)


def collect(folder: Path, to: Path) -> Path:
    """Copy an entry's folder beside a registry, and name it there."""
    entry = read_folder(folder)
    target = inside(to, entry.folder)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        with locked(to / LOCK):
            if any((target / file).exists() for file in (CONFIG, *FILES)) and read_config(target).name != entry.name:
                raise FileExistsError(f"Expected {target} to hold {entry.name} but it holds another. Move it.")
            for file in (CONFIG, *entry.files):
                if (folder / file).exists():
                    with replacing(target / file) as copy:
                        shutil.copy2(folder / file, copy)
            register(to, published_in(target))
    return target


def _told(place: str) -> Registry:
    """The registry of ``LIGHTNING_FCL_ZOO``."""
    remote = _URL.fullmatch(place)
    if remote is not None:
        digest = remote["digest"].lower()
        file = download(f"{remote['url']}/{REGISTRY}", inside(cache_folder() / "zoo", digest, REGISTRY), digest)
        return read_registry(file.read_bytes(), remote["url"])
    file = Path(place).expanduser() / REGISTRY
    if not file.is_file():
        raise FileNotFoundError(
            f"Expected LIGHTNING_FCL_ZOO to name a URL, or a folder with {REGISTRY}, but got {place}."
        )
    return read_registry(file.read_bytes(), str(file.parent))


def _verified(registry: Registry, published: Published, to_continue: bool) -> Path:
    """The folder of an entry: beside its registry, else in the cache, else downloaded to it."""
    files = published.files(to_continue)
    cached = inside(cache_folder() / "zoo", published.config["sha256"])
    remote = [place for place in registry.places if _URL.fullmatch(place)]
    folders = [inside(Path(place), published.folder) for place in registry.places if place not in remote]
    for folder in folders if remote else (*folders, cached):
        if all((folder / file).is_file() for file in files):
            for file, told in files.items():
                check_file(folder / file, told)
            return folder
    if not remote:
        raise FileNotFoundError(
            f"Expected the files of {published.entry.full_name} in {folders[0]} but this installation does not have "
            "them: they are too large to travel with the package, or their data's licence does not let them. Point "
            "LIGHTNING_FCL_ZOO at the folder `zoo` of a checkout, or at a URL that serves it."
        )
    for file, told in files.items():  # one that is in the cache already, and whole, is not asked for
        download(f"{remote[0]}/{published.folder}/{file}", inside(cached, file), told["sha256"], told["size"])
    return cached
