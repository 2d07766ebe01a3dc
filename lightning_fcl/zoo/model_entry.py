"""What is said of a published network: what it takes and gives, who made it of what, and what its files are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fcl.data.datasets.arrays import Measurement
from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.io.checksums import check_digest, read_checksums, sha256, write_checksums
from lightning_fcl.io.reading import REDOWNLOAD_HINT
from lightning_fcl.io.safe_yaml import parse_dataclass, read_yaml

CHECKSUMS_FILE = "files.txt"
"""The list of an entry's files, with the SHA-256 of each."""

CONFIG, WEIGHTS, CHECK, CARD = "config.json", "model.safetensors", "check.safetensors", "README.md"
CONTINUE = "continue.safetensors"
FILES = (CONFIG, CARD, WEIGHTS, CHECK, CONTINUE)

OutputKind = Literal["logits", "0/1", "-1/1", "features"]
StoredType = Literal["float32", "float16"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")


@dataclass(frozen=True)
class ModelEntry:
    """A published network, all but its weights.

    Args:
        name: Such as ``"har_cnn.ucihar.flwf2t_ft"``: lower case, digits, ``_``, ``-`` and dots.
        version: From 1.
        description: What it is, in a sentence.
        network: Its class and arguments, as `lightning_fcl.models.serialization.to_plain_config` gives them.
        output_kind: What it gives: ``"logits"``, least-squares estimates of ``"0/1"`` or ``"-1/1"``, or ``"features"``,
            where it names no classes.
        classes: Their names, in the order of the outputs.
        input_shape: Of a sample, as the network takes it.
        measurement: How a device's own values become such a sample; None: the network takes those that it is given.
        stored_dtype: The type of its 32-bit weights in the file.
        license: Of the ``weights`` and of the ``data``.
        recipe: What trained it: ``paper``, ``row``, ``seed``, ``command``, and ``sha256`` of its text.
        metrics: Its own numbers, and those of the paper by ``paper/`` before the name.
        limitations: What it does not do, a sentence each.
        made_with: Versions of packages, and the machine.

    Raises:
        ValueError: If these do not fit together.
    """

    name: str
    version: int
    description: str
    network: Mapping[str, Any]
    output_kind: OutputKind
    classes: list[str]
    input_shape: list[int]
    measurement: Measurement | None = None
    stored_dtype: StoredType = "float32"
    license: dict[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    limitations: list[str] = field(default_factory=list)
    made_with: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version < 1 or bool(self.classes) == (self.output_kind == "features"):
            raise InvalidValueError(
                f"Expected a version from 1, and classes unless `output_kind` are features, for {self.name} but got "
                f"{self.version}, {len(self.classes)} classes and {self.output_kind}."
            )
        if self.measurement is not None and list(self.measurement.shape) != list(self.input_shape):
            raise InvalidValueError(
                f"Expected the measurement of {self.name} to be of shape {self.input_shape} but got "
                f"{self.measurement.shape}."
            )

    @property
    def folder(self) -> str:
        """The name of its folder beside a registry."""
        return self.name if self.version == 1 else self.full_name

    @property
    def full_name(self) -> str:
        """Name and version."""
        return f"{self.name}@{self.version}"


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise InvalidValueError(
            "Expected a name such as har_cnn.ucihar.flwf2t_ft, of lower case letters, digits, _, - and dots, but got "
            f"{name[:100]!r}.",
            argument="name",
            value=name,
        )


def read_entry(config: Path) -> ModelEntry:
    """What a configuration file says; nothing that it names is imported."""
    content = read_yaml(config)
    entry_fields = content if isinstance(content, dict) else {}
    network, recipe, measurement_fields = (
        entry_fields.pop("network", None),
        entry_fields.pop("recipe", {}),
        entry_fields.pop("measurement", None),
    )
    if not isinstance(network, Mapping) or not isinstance(recipe, Mapping):
        raise InvalidValueError(
            f"Expected {config} to describe a network and a recipe by name but it does not.",
            hint=REDOWNLOAD_HINT,
            value=config,
        )
    measurement = (
        None
        if measurement_fields is None
        else parse_dataclass(Measurement, measurement_fields, f"the measurement of {config}")
    )
    return parse_dataclass(ModelEntry, entry_fields, config, network=network, recipe=recipe, measurement=measurement)


def read_folder(folder: Path) -> ModelEntry:
    """The entry of a folder, all of whose files are there and as they were published."""
    for name, digest in read_files(folder).items():
        if name != CONTINUE or (folder / name).exists():  # it is large, and only wanted to go on learning
            check_digest(folder / name, digest)
    return read_entry(folder / CONFIG)


def read_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of an entry."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        raise MissingFileError(
            f"Expected {CHECKSUMS_FILE} in {folder} but found none.",
            hint="Pass the folder of a published model.",
            value=path,
        )
    digests = read_checksums(path)
    if not {CONFIG, WEIGHTS} <= digests.keys() <= {*FILES}:
        raise InvalidValueError(
            f"Expected {path} to name {CONFIG}, {WEIGHTS} and none but {', '.join(FILES)} but got "
            f"{', '.join(digests)[:300]}.",
            hint=REDOWNLOAD_HINT,
            value=path,
        )
    return digests


def write_entry_checksums(folder: Path) -> None:
    """Write the list of the files that an entry's folder has."""
    write_checksums(
        folder / CHECKSUMS_FILE, {name: sha256(folder / name) for name in FILES if (folder / name).is_file()}
    )
