"""Devices and links as data, profiles.yaml: what was measured once, and other models are estimated from."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from lightning_fcl.errors import did_you_mean, require
from lightning_fcl.hub.documents import read_yaml

SHIPPED = Path(__file__).with_name("profiles.yaml")
MEMORIES = ("tcdm", "ram", "flash")


@dataclass(frozen=True)
class Device:
    """A microcontroller at one operating point, and one local epoch that was measured on it.

    One measurement gives one number, so the ratio of the two rates is an assumption, ``int8_per_fp32``. The rates are
    then those with which the model of the measurement takes the time that was measured: its own time is reproduced by
    construction, any other model's is an estimate.

    Args:
        name: Its name.
        power_mw: Power while it learns, in mW.
        samples: Samples of the local epoch that was measured.
        latency_ms: Time of that epoch, in ms.
        int8_macs: MACs of one of its samples in int8: the forward pass of the frozen part.
        fp32_macs: MACs of one of its samples in fp32: forward and backward pass of the trained part.
        int8_per_fp32: int8 MACs that take the time of one fp32 MAC.
        memory: Sizes of the memories in bytes: ``tcdm``, ``ram``, ``flash``, or some of these.
        description: What it is, in a line.
        source: Where the numbers come from.
        frequency_mhz: Clock; only shown.
        voltage_mv: Supply; only shown.

    Example:
        >>> device = Device("toy", 10, 28, 100, int8_macs=4000, fp32_macs=1000, int8_per_fp32=4, memory={"ram": 1024})
        >>> round(device.seconds(28 * 4000, 28 * 1000), 6), round(device.fp32_rate)
        (0.1, 560000)
    """

    name: str
    power_mw: float
    samples: int
    latency_ms: float
    int8_macs: int
    fp32_macs: int
    int8_per_fp32: float
    memory: dict[str, int]
    description: str = ""
    source: str = ""
    frequency_mhz: float = 0
    voltage_mv: float = 0

    @property
    def fp32_rate(self) -> float:
        """Effective fp32 MACs per second."""
        return self.samples * (self.int8_macs / self.int8_per_fp32 + self.fp32_macs) / (self.latency_ms / 1000)

    @property
    def int8_rate(self) -> float:
        """Effective int8 MACs per second."""
        return self.int8_per_fp32 * self.fp32_rate

    def seconds(self, int8_macs: float, fp32_macs: float) -> float:
        """Time of so many MACs, in s."""
        return int8_macs / self.int8_rate + fp32_macs / self.fp32_rate

    def millijoules(self, seconds: float) -> float:
        """Energy of so many seconds of learning, in mJ: power x time."""
        return self.power_mw * seconds


@dataclass(frozen=True)
class Link:
    """A shared medium over which one node sends at a time, and one transfer that was measured on it.

    Args:
        name: Its name.
        bytes: Size of the transfer.
        seconds: Its time.
        description: What it is, in a line.
        source: Where the numbers come from.

    Example:
        >>> Link("toy", bytes=1000, seconds=0.5).time(4000)
        2.0
    """

    name: str
    bytes: int
    seconds: float
    description: str = ""
    source: str = ""

    def time(self, size: int) -> float:
        """Time of a transfer of so many bytes, in s, in proportion to the one that was measured."""
        return self.seconds * size / self.bytes


Profile = TypeVar("Profile", Device, Link)


def read_device(name: str | Path) -> Device:
    """A device of profiles.yaml, or of a YAML file of your own with the same keys.

    Raises:
        ValueError: If the device is not known, or an entry is missing, unknown or not above 0.

    Example:
        >>> round(read_device("gap9-lpm").power_mw * 0.1784, 1)  # mJ
        4.3
    """
    return _read(Device, str(name), "devices", "profile")


def read_link(name: str | Path) -> Link:
    """A link of profiles.yaml, or of a YAML file of your own with the same keys.

    Raises:
        ValueError: As `read_device` does.

    Example:
        >>> read_link("uwb-loco").time(24040)
        1.7
    """
    return _read(Link, str(name), "links", "link")


def _read(kind: type[Profile], name: str, section: str, option: str) -> Profile:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"Expected `{option}` to be a YAML file that exists but got {name}. Mend its path.")
        return _check(kind, path.stem, read_yaml(path), str(path))
    known = read_yaml(SHIPPED)[section]
    if name not in known:
        raise ValueError(
            f"Expected `{option}` to be one of {', '.join(known)}, or a YAML file of your own, but got "
            f"{name}.{did_you_mean(name, known)}"
        )
    return _check(kind, name, known[name], f"{name} of {SHIPPED.name}")


def _check(kind: type[Profile], name: str, content: Any, where: str) -> Profile:
    jsonargparse = require("jsonargparse", "reads profiles of devices")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    known = parser.add_class_arguments(kind, skip={"name"})
    if not isinstance(content, dict):
        raise ValueError(f"Expected {where} to map names to values but got {content}. See {SHIPPED}.")
    for key in content:
        if key not in known:
            raise ValueError(f"Expected entries {', '.join(known)} in {where} but got {key}.{did_you_mean(key, known)}")
    try:
        made = kind(name=name, **vars(parser.parse_object(content)))
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"Expected {where} to have the entries of {SHIPPED} but got: {error}.") from error
    memory = {f"memory.{one}": size for one, size in content.get("memory", {}).items()}
    for one in memory:
        if one.removeprefix("memory.") not in MEMORIES:
            raise ValueError(f"Expected memories among {', '.join(MEMORIES)} in {where} but got {one}.")
    for key, value in {**content, **memory}.items():
        if isinstance(value, int | float) and (value < 0 or not isfinite(value) or (value == 0 and key != "int8_macs")):
            raise ValueError(f"Expected `{key}` in {where} to be a number above 0 but got {value}.")
    return made
