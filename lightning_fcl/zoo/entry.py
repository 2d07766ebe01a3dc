"""What is said of a published network: what it takes and gives, who made it of what, and what its files are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lightning_fcl.data.datasets.measurement import Measurement
from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.files import sha256
from lightning_fcl.hub.sealed import seal, unseal
from lightning_fcl.models.described import cast_arguments

FORMAT = 1
"""The version of what describes an entry."""

CONFIG, WEIGHTS, CHECK, CARD = "config.json", "model.safetensors", "check.safetensors", "README.md"
CONTINUE = "continue.safetensors"
FILES = (CARD, WEIGHTS, CHECK, CONTINUE)
"""The files that an entry may have beside its configuration."""

Outputs = Literal["logits", "0/1", "-1/1", "features"]
Stored = Literal["float32", "float16"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A published network, all but its weights.

    Args:
        name: Such as ``"har_cnn.ucihar.flwf2t_ft"``: lower case, digits, ``_``, ``-`` and dots.
        version: From 1.
        about: What it is, in a sentence.
        network: Its class and arguments, as `lightning_fcl.models.described.describe` gives them.
        outputs: What it gives: ``"logits"``, least-squares estimates of ``"0/1"`` or ``"-1/1"``, or ``"features"``,
            where it names no classes.
        classes: Their names, in the order of the outputs.
        shape: Of a sample, as the network takes it.
        measurement: How a device's own values become such a sample; None: the network takes those that it is given.
        stored: The type of its 32-bit weights in the file.
        licence: Of the ``weights`` and of the ``data``.
        recipe: What trained it: ``paper``, ``row``, ``seed``, ``command``, and ``sha256`` of its text.
        metrics: Its own numbers, and those of the paper by ``paper/`` before the name.
        limits: What it does not do, a sentence each.
        made_with: Versions of packages, and the machine.
        files: Size and SHA-256 of each file beside the configuration.

    Raises:
        ValueError: If these do not fit together.
    """

    name: str
    version: int
    about: str
    network: dict[str, Any]
    outputs: Outputs
    classes: list[str]
    shape: list[int]
    measurement: Measurement | None = None
    stored: Stored = "float32"
    licence: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    made_with: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version < 1 or bool(self.classes) == (self.outputs == "features"):
            raise ValueError(
                f"Expected a version from 1, and classes unless `outputs` are features, for {self.name} but got "
                f"{self.version}, {len(self.classes)} classes and {self.outputs}."
            )
        if self.measurement is not None and list(self.measurement.shape) != list(self.shape):
            raise ValueError(
                f"Expected the measurement of {self.name} to be of shape {self.shape} but got {self.measurement.shape}."
            )
        for name, told in self.files.items():
            size, digest = told.get("size"), told.get("sha256")
            whole = type(size) is int and size >= 0 and isinstance(digest, str) and _DIGEST.fullmatch(digest)
            if name not in FILES or not whole or len(told) != 2:
                raise ValueError(
                    f"Expected the files of {self.name} to be among {', '.join(FILES)}, each with its `size` and "
                    f"`sha256`, 64 digits, but got {name[:100]!r} with {str(told)[:200]}. Ask its publisher."
                )

    @property
    def folder(self) -> str:
        """The name of its folder beside a registry."""
        return self.name if self.version == 1 else self.full_name

    @property
    def full_name(self) -> str:
        """Name and version."""
        return f"{self.name}@{self.version}"

    def with_files(self, folder: Path) -> Entry:
        """The same, with size and SHA-256 of what lies in a folder."""
        paths = [folder / name for name in FILES if (folder / name).is_file()]
        return replace(self, files={path.name: file_told(path) for path in paths})

    def plain(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"format": FORMAT, **asdict(self)}

    def text(self) -> str:
        """What its configuration file holds."""
        return seal(self.plain())


def check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 100:
        raise ValueError(
            "Expected a name such as har_cnn.ucihar.flwf2t_ft, of lower case letters, digits, _, - and dots, but got "
            f"{str(name)[:100]!r}."
        )


def read_entry(content: object, where: object) -> Entry:
    told = dict(content) if isinstance(content, Mapping) else {}
    if (form := told.pop("format", None)) != FORMAT:
        raise ValueError(
            f"Expected {where} to be of format {FORMAT} but it is of {form}: another version of lightning-fcl wrote it."
            " Load it with that version."
        )
    if told.get("measurement") is not None:
        told["measurement"] = Measurement(**cast_fields(Measurement, told["measurement"], f"{where}: measurement"))
    entry = Entry(**cast_fields(Entry, told, str(where)))
    if WEIGHTS not in entry.files:
        raise ValueError(f"Expected {where} to tell of {WEIGHTS} but it does not. Get it again.")
    return entry


def cast_fields(kind: type, content: object, name: str) -> dict[str, Any]:
    """The fields of a dataclass from plain data, by their names and types."""
    if not isinstance(content, Mapping):
        raise ValueError(f"Expected {name} to be a mapping but got {content!r}.")
    known = [one.name for one in fields(kind)]
    for key in content:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(f"Expected {name} to tell of {', '.join(known)} but got `{key}`.{hint}")
    return cast_arguments(kind, content, name)


def read_folder(folder: Path) -> Entry:
    """The entry of a folder, all of whose files are there and as they were published."""
    entry = read_config(folder)
    for name in entry.files:
        if name != CONTINUE or (folder / name).exists():  # it is large, and only wanted to go on learning
            check_file(folder / name, entry.files[name])
    return entry


def read_config(folder: Path) -> Entry:
    """The entry of a folder, whatever its files are."""
    config = folder / CONFIG
    if not config.is_file():
        raise FileNotFoundError(f"Expected {CONFIG} in {folder} but found none. Name the folder of a published model.")
    return read_entry(unseal(config.read_bytes(), config), config)


def file_told(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def check_file(path: Path, told: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"Expected {path} but found no such file. Get it again.")
    size, digest = told.get("size"), told.get("sha256")
    if path.stat().st_size != size or sha256(path) != digest:
        raise ValueError(
            f"Expected {path} to be the published file of {size} bytes but its checksum is another: it is damaged. Get "
            "it again."
        )
