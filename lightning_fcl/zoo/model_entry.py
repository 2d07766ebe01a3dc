"""Description of a published network: inputs, outputs, origin, license, and the list of its files."""

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
from lightning_fcl.validation import format_names

CHECKSUMS_FILE = "files.txt"
"""File that lists an entry's files with their SHA-256."""

CONFIG, WEIGHTS, CHECK, CARD = "config.json", "model.safetensors", "check.safetensors", "README.md"
CONTINUE = "continue.safetensors"
FILES = (CONFIG, CARD, WEIGHTS, CHECK, CONTINUE)

OutputKind = Literal["logits", "0/1", "-1/1", "features"]
StoredType = Literal["float32", "float16"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")


@dataclass(frozen=True)
class ModelEntry:
    """Description of a published network, without its weights.

    Args:
        name: Name such as ``"har_cnn.ucihar.flwf2t_ft"``. Allowed are lower-case letters, digits, ``_``, ``-`` and
            dots.
        version: Version, from 1.
        description: Description in one sentence.
        network: Class and arguments, as returned by `lightning_fcl.models.serialization.to_plain_config`.
        output_kind: Kind of the outputs: ``"logits"``, or least-squares estimates of targets with two values (``"0/1"``
            or ``"-1/1"``), or ``"features"`` if there are no class names.
        classes: Names of the classes, in the order of the outputs.
        input_shape: Shape of a sample as the network expects it.
        measurement: Conversion of the raw values of a device to a sample. None if raw values are samples.
        stored_dtype: Data type in which the file stores 32-bit weights.
        license: Licenses of the ``weights`` and of the ``data``.
        recipe: Recipe that trained the network: ``paper``, ``row``, ``seed``, ``command`` and other keys. ``sha256`` is
            the SHA-256 of the recipe's files and settings.
        metrics: Metrics of the network by name. Values of the paper have the prefix ``paper/``.
        limitations: Limitations, one sentence each.
        made_with: Version of each package that the run used, and a description of the machine.

    Raises:
        ValueError: If the name or the version is invalid, or if the arguments contradict each other.
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
        if self.version < 1:
            raise InvalidValueError(f"Expected `version` of {self.name} to be at least 1, but got {self.version}.")
        if bool(self.classes) == (self.output_kind == "features"):
            raise InvalidValueError(
                f"Expected {'no ' if self.classes else ''}class names for {self.name}, whose `output_kind` is "
                f"{self.output_kind}, but got {format_names(self.classes) or 'none'}."
            )
        if self.measurement is not None and list(self.measurement.shape) != list(self.input_shape):
            raise InvalidValueError(
                f"Expected the measurement of {self.name} to have the shape {self.input_shape}, but got "
                f"{self.measurement.shape}."
            )

    @property
    def folder(self) -> str:
        """Name of the entry's folder. This folder is in the folder that contains the registry file."""
        return self.name if self.version == 1 else self.full_name

    @property
    def full_name(self) -> str:
        """Name and version, as in ``"name@1"``."""
        return f"{self.name}@{self.version}"


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise InvalidValueError(
            "Expected a name like har_cnn.ucihar.flwf2t_ft, with at most 100 lower-case letters, digits, _, - and "
            f"single dots, a letter or digit at the start, and no dot at the end, but got {name[:100]!r}.",
            argument="name",
            value=name,
        )


def read_entry(config: Path) -> ModelEntry:
    """Read an entry from its configuration file. Classes named in the file are not imported."""
    content = read_yaml(config)
    entry_fields = content if isinstance(content, dict) else {}
    network, recipe, measurement_fields = (
        entry_fields.pop("network", None),
        entry_fields.pop("recipe", {}),
        entry_fields.pop("measurement", None),
    )
    if not isinstance(network, Mapping) or not isinstance(recipe, Mapping):
        raise InvalidValueError(
            f"Expected {config} to contain the mappings `network` and `recipe`, but at least one is missing or is "
            "not a mapping.",
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
    """Verify the files of an entry's folder by checksums, and return the entry."""
    for name, digest in read_files(folder).items():
        # The file to continue from is large, and only needed to continue learning.
        if name != CONTINUE or (folder / name).exists():
            check_digest(folder / name, digest)
    return read_entry(folder / CONFIG)


def read_files(folder: Path) -> dict[str, str]:
    """Return the listed SHA-256 of each file in an entry's folder, by file name. The files are not verified."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        raise MissingFileError(
            f"Expected {CHECKSUMS_FILE} in {folder}, but the file does not exist.",
            hint="Pass the folder of a published model.",
            value=path,
        )
    digests = read_checksums(path)
    if not {CONFIG, WEIGHTS} <= digests.keys() <= {*FILES}:
        raise InvalidValueError(
            f"Expected {path} to list {CONFIG}, {WEIGHTS} and no files other than {', '.join(FILES)}, but got "
            f"{', '.join(digests)[:300]}.",
            hint=REDOWNLOAD_HINT,
            value=path,
        )
    return digests


def write_entry_checksums(folder: Path) -> None:
    """Write the list of the existing files in an entry's folder, with their SHA-256."""
    write_checksums(
        folder / CHECKSUMS_FILE, {name: sha256(folder / name) for name in FILES if (folder / name).is_file()}
    )
